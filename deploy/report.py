"""Clusters as text for operators: what would change, where members would be, how they are."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.box import SIMPLE
from rich.table import Table

from deploy.config import ROLES, ClusterConfig, Role
from engine.errors import TandemError
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.report import plan_report
from engine.model_files import resolve_folder

if TYPE_CHECKING:
    from deploy.controller import ClusterStatus
    from deploy.placement import Planned

NODE_ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")
SECRETS: Final = ("cluster_token", "api_key")
VARIABLES: Final = "runtime_env.env_vars."
"""Variables of processes hold keys of hubs and stores."""


def changes(old: ClusterConfig | None, new: ClusterConfig) -> Iterator[str]:
    """One line for each key of the cluster file that would change; secrets are not shown."""
    if old is None:
        members = ", ".join(f"{role} {new.group(role).replicas}" for role in ROLES)
        yield f"+ cluster {new.name}: {members}"
        return
    before, after = dict(_flat(old)), dict(_flat(new))
    # What a file leaves to the cluster is no change.
    if new.cluster_token is None:
        after["cluster_token"] = before["cluster_token"]
    changed = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
    for key in changed:
        is_secret = key.rpartition(".")[2] in SECRETS or key.startswith(VARIABLES)
        was, will = ("***", "***") if is_secret else (before.get(key), after.get(key))
        yield f"~ {key}: {was} -> {will}"
    if not changed:
        yield "nothing changes"


def placement_table(planned: "Sequence[Planned]") -> Table:
    """The machine of each member that would start, or why there is none."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("would start", "on", "Ray node", "problem"):
        table.add_column(column, overflow="fold")
    for each in planned:
        address = "-" if each.machine is None else each.machine.address
        node = "-" if each.machine is None else each.machine.node_id[:8]
        table.add_row(each.name, address, node, each.problem)
    return table


def arenas(config: ClusterConfig) -> Iterator[str]:
    """The contents of each node's arena, by role; a model that is not on this machine has none."""
    for role in NODE_ROLES:
        options = config.node(role)
        if not config.group(role).replicas:
            continue
        try:
            model = read_config(resolve_folder(options.model), options.dtype, device=options.device)
            plan = plan_arena(
                model.groups,
                options.block_size,
                options.kv_cache_memory_bytes,
                hash_block_size=options.hash_block_size,
            )
        except TandemError as error:
            yield f"{role}: {error}"
            continue
        yield f"{role}: {plan_report(plan, model.max_position_embeddings)}"


def urls_of_proxies(status: "ClusterStatus") -> list[str]:
    """Where clients ask."""
    told = [it.told for it in status.members if it.role == "proxy" and it.told is not None]
    return [it.url for it in told if it.phase == "running"]


def status_table(status: "ClusterStatus") -> Table:
    """All members, under a line that counts those that serve beside those that are wanted."""
    config = status.config
    if config is None:
        return Table("no cluster", box=None)
    counts = [f"{role} {status.count(role)} of {config.group(role).replicas}" for role in ROLES]
    title = f"cluster {config.name}, generation {status.generation}: {', '.join(counts)}"
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=title, title_justify="left")
    if urls := urls_of_proxies(status):
        table.caption = f"clients ask {', '.join(f'{url}/v1' for url in urls)}"
        table.caption_justify = "left"
    for column in ("member", "stage", "URL", "engine id", "Ray node", "GPUs", "life", "problem"):
        table.add_column(column, overflow="fold")
    for member in status.members:
        told = member.told
        table.add_row(
            member.name,
            member.stage if member.is_current else f"{member.stage}, outdated",
            "-" if told is None else told.url,
            "-" if told is None else told.engine_id,
            "-" if told is None else told.node_id[:8],
            "" if told is None else ",".join(told.gpus),
            str(member.life),
            member.problem,
        )
    return table


def _flat(config: ClusterConfig) -> Iterator[tuple[str, Any]]:
    """Every value of a cluster file by its path; an empty mapping is as none."""

    def walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, each in value.items():
                yield from walk(f"{path}.{key}" if path else str(key), each)
        else:
            yield path, value

    return walk("", msgspec.to_builtins(config))
