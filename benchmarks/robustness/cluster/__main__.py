"""`python -m benchmarks.robustness.cluster`: a cluster on Ray that changes, and breaks, under load.

Four raylets on this machine, each with an address of its own: the head with the proxy, three with
two prefill and two decode nodes; the quick form has two raylets and one node of either role.
Clients ask without a pause; every answer is compared with that of one node. Meanwhile an operator
scales, drains and restarts, and then processes, a raylet and last Ray's GCS are killed. Planned
changes may fail no request; after a loss the cluster must become whole by itself, but for the GCS,
without which Ray replaces nothing.
The command ends with status 1 where an answer differs, or a planned change fails one.
"""

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import typer

from benchmarks.robustness.cluster.clients import STREAMS, Asked, Clients, expected_of
from benchmarks.support import machine, plots, report
from benchmarks.support.model_folders import DEMO_MODEL
from deploy.config import ClusterConfig, DecodeGroup, DecodeScaling, PrefillGroup, ProxyGroup
from deploy.report import urls_of_proxies
from deploy.session import new_session

if TYPE_CHECKING:
    from deploy.controller import ClusterStatus
    from deploy.ray_cluster import Cluster

NAME: Final = "cluster"
SECONDS: Final = (600.0, 150.0)
QUIET_S, QUICK_QUIET_S = 6.0, 1.0
"""Of load before and after each act."""
NODES, QUICK_NODES = 2, 1
"""Of either role."""
RAYLETS, QUICK_RAYLETS = 4, 2
WHOLE_S: Final = 90.0
NUM_KILLS: Final = 15
CALL_S: Final = 20.0
WITHOUT_GCS_S: Final = 30.0
OPTIONS: Final = {
    "host": "auto",
    "kv_cache_memory_bytes": 32 << 20,
    "served_model_name": ["tandem-demo"],
}
HEADERS: Final = ("what", "planned", "requests", "failed", "different", "longest silence", "whole")


@dataclass(slots=True)
class Act:
    """One change or loss, the requests that ended during it, and how long until all was whole."""

    name: str
    is_planned: bool
    asked: Sequence[Asked] = ()
    whole_s: float = 0.0

    def count(self, outcome: str) -> int:
        return sum(it.outcome == outcome for it in self.asked)

    def row(self) -> tuple[str, ...]:
        silence = max((it.silence_s for it in self.asked), default=0.0)
        return (
            self.name,
            "yes" if self.is_planned else "no",
            str(len(self.asked)),
            str(self.count("failed")),
            str(self.count("different")),
            f"{silence:.1f} s",
            "never" if math.isnan(self.whole_s) else f"{self.whole_s:.1f} s",
        )


@dataclass(slots=True)
class Stage:
    """The cluster under load, on which acts are played."""

    cluster: "Cluster"
    raylets: Any
    clients: Clients
    quiet_s: float
    num_nodes: int
    acts: list[Act] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def play(self, name: str, act: Callable[[], object], *, is_planned: bool) -> Act:
        """Does it, waits until the cluster is whole, and counts the requests of that time."""
        first = len(self.clients.asked)
        started = time.monotonic()
        act()
        self.cluster.wait_until_whole(lambda _: None, WHOLE_S)
        whole_s = time.monotonic() - started
        time.sleep(self.quiet_s)
        done = Act(name, is_planned, self.clients.asked[first:], whole_s)
        self.acts.append(done)
        return done

    def status(self) -> "ClusterStatus":
        return self.cluster.status()

    def kill(self, role: str) -> None:
        """Kills the first process of a role, and waits until that was noticed."""
        victim = next(it for it in self.status().members if it.role == role)
        assert victim.told is not None
        os.kill(victim.told.pid, signal.SIGKILL)
        self._until_changed(victim.name, victim.life)

    def kill_controller(self) -> None:
        import ray

        from deploy.member import NAMESPACE

        actor = ray.get_actor(f"{self.cluster.name}/controller", NAMESPACE)
        ray.kill(actor, no_restart=False)
        time.sleep(2.0)

    def remove_raylet(self) -> None:
        """The machine of the first decode node goes, with everything on it."""
        victim = next(it for it in self.status().members if it.role == "decode")
        assert victim.told is not None
        node_id = victim.told.node_id
        raylet = next(it for it in self.raylets.worker_nodes if it.node_id == node_id)
        self.raylets.remove_node(raylet, allow_graceful=False)
        self._until_changed(victim.name, victim.life)

    def let_it_grow(self) -> None:
        """The autoscaler adds a decode node: each stream counts as work for one."""
        self._scale_by_load(1)
        self._until_replicas(3)

    def let_it_shrink(self) -> None:
        """Without requests it takes the node away again."""
        self.clients.is_paused = True
        self._until_replicas(2)
        self.cluster.apply(config_of(NODES, NODES), self.status())
        self.clients.is_paused = False

    def _scale_by_load(self, target: int) -> None:
        scaling = DecodeScaling(
            min_replicas=2,
            max_replicas=3,
            target_ongoing_requests=target,
            upscale_delay_s=1.0,
            downscale_delay_s=3.0,
        )
        config = config_of(NODES, NODES)
        decode = msgspec.structs.replace(config.decode, autoscaling=scaling)
        self.cluster.apply(msgspec.structs.replace(config, decode=decode), self.status())

    def _until_replicas(self, number: int) -> None:
        deadline = time.monotonic() + WHOLE_S
        while (config := self.status().config) is None or config.decode.replicas != number:
            assert time.monotonic() < deadline, f"the load never made it {number}"
            time.sleep(0.2)

    def _until_changed(self, name: str, life: int) -> None:
        deadline = time.monotonic() + WHOLE_S
        while any(
            it.name == name and it.life == life and it.stage == "serving"
            for it in self.status().members
        ):
            assert time.monotonic() < deadline, f"nobody has noticed that {name} is lost"
            time.sleep(0.2)


def config_of(prefill: int, decode: int) -> ClusterConfig:
    """The cluster: nodes on the workers, the proxy on the head."""
    return ClusterConfig(
        name="bench",
        model=str(DEMO_MODEL),
        config=OPTIONS,
        prefill=PrefillGroup(replicas=prefill, resources={"worker": 1}),
        decode=DecodeGroup(replicas=decode, resources={"worker": 1}),
        proxy=ProxyGroup(resources={"head": 1}, config={"host": "auto", "port": 0}),
    )


@contextmanager
def many_raylets(number: int) -> Iterator[Any]:
    """The head at 127.0.0.1 and workers at the next addresses, with room for four nodes each."""
    with new_session() as session:
        os.environ.update(session.environment())
        # Ray reads its environment when it is imported.
        from ray.cluster_utils import Cluster as Raylets

        raylets = Raylets()
        try:
            for place in range(number):
                own: dict[str, Any] = {} if place else {"include_dashboard": False}
                raylets.add_node(
                    num_cpus=4,
                    resources={"worker": 4} if place else {"head": 1},
                    node_ip_address=f"127.0.0.{place + 1}",
                    object_store_memory=80 << 20,
                    temp_dir=str(session.ray_folder),
                    **own,
                )
            yield raylets
        finally:
            raylets.shutdown()


Acts: TypeAlias = list[tuple[str, Callable[[], object]]]


def planned_acts(stage: Stage) -> Acts:
    """The work of an operator; the first and the last are the quick form."""
    cluster, usual = stage.cluster, stage.num_nodes
    changed = msgspec.structs.replace(
        config_of(usual, usual), config={**OPTIONS, "max_num_batched_tokens": 1024}
    )
    return [
        (
            f"decode scaled from {usual} to {usual + 1}",
            lambda: cluster.scale("decode", usual + 1),
        ),
        ("decode scaled from 3 to 1", lambda: cluster.scale("decode", 1)),
        ("decode scaled from 1 to 2", lambda: cluster.scale("decode", 2)),
        ("decode grown by the load", stage.let_it_grow),
        ("decode shrunk by the load", stage.let_it_shrink),
        ("a prefill node drained", lambda: cluster.drain(_first(stage, "prefill"))),
        ("prefill scaled from 1 to 2", lambda: cluster.scale("prefill", 2)),
        ("all nodes replaced, an option changed", lambda: cluster.apply(changed, stage.status())),
    ]


def losses(stage: Stage) -> Acts:
    """Processes first, a machine last."""
    return [
        ("the controller killed", stage.kill_controller),
        ("a prefill node killed", lambda: stage.kill("prefill")),
        *[
            (f"a decode node killed ({it + 1})", lambda: stage.kill("decode"))
            for it in range(NUM_KILLS)
        ],
        ("the proxy killed", lambda: stage.kill("proxy")),
        ("a machine lost", stage.remove_raylet),
    ]


def play_all(stage: Stage, *, quick: bool, told: report.Report) -> None:
    """Planned changes first, then losses; the quick form takes some of them."""
    planned, lost = planned_acts(stage), losses(stage)
    if quick:
        planned, lost = [planned[0], planned[-1]], [lost[0], lost[2]]
    with report.progress(told.console, len(planned) + len(lost)) as tell:
        for is_planned, acts in ((True, planned), (False, lost)):
            for name, act in acts:
                done = tell(name)
                stage.play(name, act, is_planned=is_planned)
                done()


def _first(stage: Stage, role: str) -> str:
    return next(it.name for it in stage.status().members if it.role == role)


def merged(acts: Sequence[Act]) -> list[Act]:
    """The kills of one role as one act: requests together, the longest time until whole."""
    rows: dict[str, Act] = {}
    for act in acts:
        name = act.name.partition(" (")[0]
        if name not in rows:
            rows[name] = Act(name, act.is_planned, list(act.asked), act.whole_s)
            continue
        rows[name].asked = [*rows[name].asked, *act.asked]
        rows[name].whole_s = max(rows[name].whole_s, act.whole_s)
    return list(rows.values())


def left_behind() -> list[str]:
    """Actors and placement groups that outlive their cluster."""
    from ray.util.placement_group import placement_group_table

    from deploy.member import actor_names

    groups = [it["name"] for it in placement_group_table().values() if it["state"] != "REMOVED"]
    return [*actor_names(), *groups]


def under_load(cluster: "Cluster", raylets: Any, *, quick: bool = False) -> Stage:
    """Applies the file, waits until all of it serves, and begins to ask."""
    num_nodes = QUICK_NODES if quick else NODES
    cluster.apply(config_of(num_nodes, num_nodes), cluster.status())
    status = cluster.wait_until_whole(lambda _: None)
    node = next(it.told for it in status.members if it.role == "decode")
    assert node is not None
    clients = Clients(urls_of_proxies(status)[0], asyncio.run(expected_of(node.url)))
    return Stage(cluster, raylets, clients, QUICK_QUIET_S if quick else QUIET_S, num_nodes)


def played(raylets: Any, *, quick: bool, told: report.Report) -> Stage:
    """Everything on one cluster, which is stopped; then one more that loses the GCS."""
    from deploy.ray_cluster import Clusters, connected

    with connected(raylets.address) as thread:
        cluster = Clusters(thread).named("bench")
        stage = under_load(cluster, raylets, quick=quick)
        try:
            play_all(stage, quick=quick, told=told)
        finally:
            stage.clients.close()
            cluster.stop(lambda _: None)
        stage.left = thread.call("look for leaks", CALL_S, left_behind)
        if not quick:
            stage.acts.append(without_gcs(under_load(cluster, raylets)))
    return stage


def without_gcs(stage: Stage) -> Act:
    """Ray's GCS is killed and stays away: requests go on, but nothing is replaced any more.

    A minute later Ray ends its processes, and all members with them.
    """
    first = len(stage.clients.asked)
    stage.raylets.head_node.kill_gcs_server(check_alive=False)
    time.sleep(WITHOUT_GCS_S)
    stage.clients.close()
    return Act(
        f"Ray's GCS away for {WITHOUT_GCS_S:g} s", False, stage.clients.asked[first:], math.nan
    )


def broken_promises(acts: Sequence[Act], left: Sequence[str]) -> list[str]:
    """Lines for people; none where all is well."""
    return [
        *(f"{it.name}: {it.count('different')} different" for it in acts if it.count("different")),
        *(
            f"{it.name}: {it.count('failed')} failed"
            for it in acts
            if it.is_planned and it.count("failed")
        ),
        *(f"left behind: {name}" for name in left),
    ]


def main(out: report.Out = report.RESULTS, quick: report.Quick = False) -> None:
    """Changes and losses of a cluster on Ray, under load; status 1 for a broken promise."""
    told = report.Report(NAME, out, SECONDS, cpu="all", quick=quick)
    with many_raylets(QUICK_RAYLETS if quick else RAYLETS) as raylets:
        stage = played(raylets, quick=quick, told=told)
    acts, asked = merged(stage.acts), stage.clients.asked
    note = f"{STREAMS} clients; all of it shares {machine.describe(told.host)}"
    told.publish("A cluster on Ray", headers=HEADERS, rows=[it.row() for it in acts], note=note)
    began = asked[0].at
    silences = [(it.at - began, it.silence_s) for it in asked]
    ends = [(act.asked[-1].at - began, act.whole_s) for act in stage.acts if act.asked]
    lines = {"longest silence of a request": silences, "until whole": ends}
    plots.curves(told.plot(), {"": lines}, xlabel="seconds", ylabel="seconds", log_x=False)
    broken = broken_promises(acts, stage.left)
    for text in broken:
        told.console.print(text, style="bold red")
    told.save({"acts": [it.row() for it in acts], "broken": broken})
    raise typer.Exit(1 if broken else 0)


if __name__ == "__main__":
    typer.run(main)
