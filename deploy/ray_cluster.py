"""Clusters on a Ray as a command sees them: connect, find the controller, ask it, wait.

Knows no command line and reads no environment; Ray reads its own when this is imported. Every call
into Ray has a deadline, also where Ray's own waits for ever, as for a head that is dead.
"""

import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import msgspec
import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.config import ClusterConfig, NoClusterError, Role
from deploy.controller import ClusterStatus, Controller, ControllerActor
from deploy.member import NAMESPACE, actor_names, alive_machines, groups_of, why
from deploy.placement import Planned, plan
from deploy.process import SIGNALS, adopt_orphans, signals_held
from deploy.reconcile import Stage
from engine.errors import ConfigError, DeadlineExceededError, TandemError, UnavailableError

CONTROLLER: Final = "controller"
HEAD: Final = "node:__internal_head__"
OBJECT_STORE_BYTES: Final = 80 << 20
LISTEN_S: Final = 5.0
CONNECT_S: Final = 30.0
CALL_S: Final = 20.0
LEAVE_S: Final = 3.0
"""A process that was interrupted may have a call under way."""
EMBED_S: Final = 120.0
CONTROLLER_S: Final = 300.0
"""Until a new controller is there: Ray may have to install a `runtime_env`, on a busy head."""
WAIT_S: Final = 900.0
STOP_S: Final = 300.0
AGAIN_S: Final = 20.0
LOOK_S: Final = 0.3

Progress = Callable[[str], None]
T = TypeVar("T")


class RayThread:
    """The one thread that calls Ray, which waits for ever now and then; callers do not.

    Signals reach the main thread meanwhile. `is_stuck`: the process has to end without Ray's own
    cleaning up, which would wait too.
    """

    def __init__(self) -> None:
        self.is_stuck = False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def call(self, what: str, seconds: float, function: Callable[[], T]) -> T:
        """Its result. Raises UnavailableError for Ray's errors, DeadlineExceededError if late."""
        if self.is_stuck:
            raise DeadlineExceededError(f"{what}: Ray has not come back from a call before")
        future: Future[T] = Future()
        self._calls.put((future, function))
        try:
            return future.result(seconds)
        except TimeoutError as error:
            # An actor that is late ends the call, and leaves the thread free.
            self.is_stuck = not future.done()
            raise DeadlineExceededError(f"{what}: Ray has not answered in {seconds:g} s") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TandemError):
                raise error.cause from None
            raise UnavailableError(f"{what}: {error}") from error
        except ray.exceptions.RayError as error:
            raise UnavailableError(f"{what}: {why(error)}") from error
        except (OSError, RuntimeError) as error:
            raise UnavailableError(f"{what}: {error}") from error

    def _run(self) -> None:
        # The processes of a Ray of our own inherit the block: service managers signal the whole
        # process group, and Ray must outlive the cluster on it, since only Ray can stop that.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        while True:
            future, function = self._calls.get()
            try:
                future.set_result(function())
            # Broad: the caller's thread raises it.
            except BaseException as error:
                future.set_exception(error)


@contextmanager
def connected(address: str) -> Iterator[RayThread]:
    """A running Ray. Raises UnavailableError when none answers or lets us in."""
    _look_for(address)
    thread = RayThread()
    # There is nothing to leave before it is done: Ctrl-C ends the process at once.
    _init(thread, f"no Ray at {address}, or another token", CONNECT_S, address=address)
    try:
        yield thread
    finally:
        _shut_down(thread, LEAVE_S)


@contextmanager
def embedded(folder: Path, resources: dict[str, float]) -> Iterator[tuple[RayThread, str]]:
    """A Ray of our own that ends with the block, its files below `folder`; yields its address."""
    thread = RayThread()
    try:
        with signals_held():
            _init(
                thread,
                "Ray did not start",
                EMBED_S,
                address="local",
                include_dashboard=False,
                # Twice what is wanted at first: members are added, and replaced by new ones.
                num_cpus=max(os.cpu_count() or 1, math.ceil(2 * resources.get("CPU", 0.0))),
                # Ray counts the GPUs itself.
                resources={n: 2 * it for n, it in resources.items() if n not in ("CPU", "GPU")},
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
            )
        yield thread, str(ray.get_runtime_context().gcs_address)
    finally:
        # A raylet may end before its workers. Not sooner: helpers of each node that dies while the
        # cluster serves would stay zombies of this process.
        adopt_orphans()
        _shut_down(thread, CALL_S)


class Clusters:
    """The clusters of one Ray, by name."""

    def __init__(self, thread: RayThread) -> None:
        self._thread = thread

    def names(self) -> list[str]:
        """All that were applied and not stopped."""
        actors = self._thread.call("list clusters", CALL_S, actor_names)
        ends = f"/{CONTROLLER}"
        return sorted(name.removesuffix(ends) for name in actors if name.endswith(ends))

    def only(self, name: str | None) -> "Cluster":
        """The one of this name, or the only one. Raises NoClusterError if it is not there."""
        names = self.names()
        if name is None and len(names) > 1:
            raise ConfigError(f"this Ray has the clusters {', '.join(names)}: give --name")
        if not names or (name is not None and name not in names):
            there = f"; there is {', '.join(names)}" if names else ""
            called = "no cluster" if name is None else f"no cluster {name}"
            raise NoClusterError(f"{called} is up on this Ray{there}")
        return Cluster(self._thread, name or names[0])

    def named(self, name: str) -> "Cluster":
        """The one of this name, which may not be up."""
        return Cluster(self._thread, name)


class Cluster:
    """One cluster, by its controller."""

    def __init__(self, thread: RayThread, name: str) -> None:
        self.name = name
        self._thread = thread

    def status(self) -> ClusterStatus:
        """Of a cluster that is not up, an empty one. A controller that begins again is awaited."""
        deadline = time.monotonic() + AGAIN_S
        while True:
            try:
                return self._ask(Controller.status)
            except NoClusterError:
                return ClusterStatus()
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(LOOK_S)

    def plan(self, config: ClusterConfig) -> list[Planned]:
        """The machine of each member that is not there yet, if it were started now."""
        machines = self._thread.call("look at machines", CALL_S, lambda: alive_machines(self.name))
        there = [it.name for it in self.status().members if it.stage is not Stage.FAILED]
        return plan(config, machines, there)

    def apply(self, config: ClusterConfig, status: ClusterStatus) -> int:
        """The cluster shall be so; returns at once with the generation.

        `status` is what the caller has looked at. Raises ConfigError where somebody has changed
        the cluster since.
        """
        token = status.config.cluster_token if status.config else secrets.token_urlsafe(32)
        config = msgspec.structs.replace(config, cluster_token=config.cluster_token or token)
        create = partial(self._create, config.runtime_env)
        self._wait_for_controller(self._thread.call("start the controller", CALL_S, create))
        return self._ask(Controller.apply, config, status.generation)

    def scale(self, role: Role, replicas: int) -> int:
        return self._ask(Controller.scale, role, replicas)

    def drain(self, name: str) -> int:
        return self._ask(Controller.drain, name)

    def restart(self, names: Sequence[str]) -> list[str]:
        return self._ask(Controller.restart, list(names))

    def wait_until_whole(self, progress: Progress, seconds: float = WAIT_S) -> ClusterStatus:
        """Says what changes until all members serve.

        Raises ConfigError for a member that would fail again and again, DeadlineExceededError.
        """
        deadline = time.monotonic() + seconds
        said: dict[str, str] = {}
        while True:
            status = self.status()
            for member in status.members:
                text = f"{member.name} {member.stage}"
                if member.problem and member.stage is not Stage.SERVING:
                    text += f": {member.problem}"
                if said.get(member.name) != text:
                    progress(text)
                said[member.name] = text
                if member.stage is Stage.FAILED and member.is_wrong_option:
                    raise ConfigError(f"{member.name}: {member.problem}")
            if status.is_whole:
                return status
            if time.monotonic() > deadline:
                late = "; ".join(said[it.name] for it in status.members if it.stage != "serving")
                raise DeadlineExceededError(f"waited {seconds:g} s for the cluster: {late}")
            time.sleep(LOOK_S)

    def stop(self, progress: Progress) -> None:
        """Drains all members, ends the controller and removes what may be left of them."""
        try:
            self._ask(Controller.stop)
            self._wait_until_stopped(progress)
        except NoClusterError:
            pass  # it never came up
        # A controller that cannot do it leaves all of it to this process.
        except (UnavailableError, DeadlineExceededError) as error:
            progress(f"the controller does not stop the cluster: {error}")
        self._thread.call("remove members", CALL_S, self._remove)

    def read_log(self, name: str, num_lines: int) -> str:
        """The end of a member's log. Raises ConfigError for no member."""
        told = {it.name: it.told for it in self.status().members if it.told is not None}
        if name not in told:
            there = ", ".join(sorted(told)) or "none"
            raise ConfigError(f"no member {name} has a log; there are {there}")
        file, where = told[name].log, NodeAffinitySchedulingStrategy(told[name].node_id, soft=False)

        def read() -> str:
            tail = ray.remote(_tail).options(num_cpus=0, scheduling_strategy=where)
            text: str = ray.get(tail.remote(file, num_lines), timeout=CALL_S)
            return text

        return self._thread.call(f"read {file}", CALL_S + 5.0, read)

    def _wait_until_stopped(self, progress: Progress) -> None:
        deadline, said = time.monotonic() + STOP_S, ""
        while members := self.status().members:
            leaving = [it.name for it in members if it.stage is Stage.DRAINING]
            if leaving and (text := f"stopping {', '.join(leaving)}") != said:
                progress(said := text)
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"the members have not ended within {STOP_S:g} s")
            time.sleep(LOOK_S)

    def _ask(self, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """The result of a method of `Controller`, for this cluster's."""
        name = method.__name__

        def ask() -> T:
            answer: T = ray.get(self._controller().ask.remote(name, *arguments), timeout=CALL_S)
            return answer

        return self._thread.call(f"{name} of cluster {self.name}", CALL_S + 5.0, ask)

    def _controller(self) -> Any:
        try:
            return ray.get_actor(f"{self.name}/{CONTROLLER}", NAMESPACE)
        except ValueError as error:  # Ray's answer for no actor of that name
            raise NoClusterError(f"no cluster {self.name} is up on this Ray") from error

    def _create(self, runtime_env: dict[str, Any]) -> "ray.ObjectRef[None]":
        """Makes the controller; of several commands at once one does, and all find it.

        The reference is ready once the controller is there. It is on the head: Ray takes a minute
        to miss any other machine that falls silent.
        """
        actor = ray.remote(ControllerActor).options(
            name=f"{self.name}/{CONTROLLER}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            resources={HEAD: 0.001},
            runtime_env=runtime_env,
        )
        ready: ray.ObjectRef[None] = actor.remote(self.name).__ray_ready__.remote()
        return ready

    def _wait_for_controller(self, ready: "ray.ObjectRef[None]") -> None:
        """In short calls: whoever is interrupted meanwhile has to reach Ray, to clean up."""
        what, deadline = "start the controller", time.monotonic() + CONTROLLER_S
        look = partial(ray.wait, [ready], timeout=LOOK_S)
        while not self._thread.call(what, CALL_S, look)[0]:
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"{what}: it is not there after {CONTROLLER_S:g} s; Ray's logs on the head, "
                    "of the raylet and of runtime_env, say why"
                )
        # It may have ended instead.
        self._thread.call(what, CALL_S, partial(ray.get, ready))

    def _remove(self) -> None:
        names = [it for it in actor_names() if it.startswith(f"{self.name}/")]
        # The controller first: it would begin the members anew.
        for name in sorted(names, key=lambda it: not it.endswith(f"/{CONTROLLER}")):
            with suppress(ValueError):
                ray.kill(ray.get_actor(name, NAMESPACE))
        for group in groups_of(self.name).values():
            remove_placement_group(group)


def _look_for(address: str) -> None:
    """Raises UnavailableError where nobody listens, which Ray takes half a minute to find out."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():  # such as auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTEN_S).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"no Ray at {address}: {error}") from error


def _init(thread: RayThread, problem: str, seconds: float, **options: Any) -> None:
    def init() -> None:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)

    thread.call(problem, seconds, init)


def _shut_down(thread: RayThread, seconds: float) -> None:
    if not thread.is_stuck:
        with suppress(DeadlineExceededError):
            thread.call("leave Ray", seconds, ray.shutdown)


def _tail(file: str, num_lines: int) -> str:
    """Runs on the machine where the file is."""
    lines = Path(file).read_text(errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])
