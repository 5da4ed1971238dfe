"""Nodes with tiers in this process, and checks that they leave nothing in use."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from connector.multi.connector import MultiConnector
from connector.offload.connector import OffloadConnector
from connector.offload.host_slots import HostSlots
from connector.offload.index import ItemIndex
from connector.offload.metrics import OffloadStats
from connector.offload.tiers.tier_file import Files
from serving.config import KVTransferConfig
from serving.node.server import NodeServer
from tests.support.cache.recount import evict_all
from tests.support.nodes.cluster import Cluster, settled, until
from tests.support.nodes.engine_thread import run_in_engine

MIB = 1 << 20


def tier_config(**extra: Any) -> KVTransferConfig:
    """An OffloadConnector; `extra`: its own options."""
    return KVTransferConfig(kv_connector="OffloadConnector", kv_connector_extra_config=extra)


async def start_with_tiers(
    cluster: Cluster,
    model: Path,
    config: KVTransferConfig,
    open_files: Callable[[Path], Files] = Files,
    *,
    kind: str = "decode",
    **changes: Any,
) -> NodeServer:
    """A node whose calls to the file system are those of `open_files`."""
    options = {"enable_prefix_caching": True, "kv_transfer_config": config, **changes}
    build = partial(OffloadConnector.builder, open_files=open_files)
    return await cluster.start_with(build, kind, model, **options)


def tiers_of(node: NodeServer) -> OffloadConnector:
    """The node's tiers, which may be one of several connectors."""
    connector = node.connector
    if isinstance(connector, MultiConnector):
        connector = connector.children["OffloadConnector"]
    assert isinstance(connector, OffloadConnector)
    return connector


def stats_of(node: NodeServer) -> OffloadStats:
    """The counts of the node's tiers."""
    return tiers_of(node).scheduler._stats


async def tiers_settled(node: NodeServer) -> None:
    """Waits until nothing is under way, and recounts index and slots."""
    scheduler = tiers_of(node).scheduler

    def at_rest() -> bool:
        return scheduler.writes.is_idle and not (scheduler._loads or scheduler._victims)

    await until(at_rest)
    await settled(node)
    await run_in_engine(node.engine, partial(check_slots, scheduler.index, scheduler.slots))


async def forget(node: NodeServer) -> None:
    """Empties the arena's cache, so that only the tiers remember."""
    await tiers_settled(node)
    await run_in_engine(node.engine, partial(evict_all, node.engine.core.scheduler.cache))
    node.engine.wake()
    await tiers_settled(node)


def check_slots(index: ItemIndex, slots: HostSlots) -> None:
    """Every slot in use is one entry's, and nobody reads or writes any."""
    entries = {entry.host: entry.item.key for entry in index if entry.host is not None}
    held = {offset: key for unit in slots._units.values() for offset, key in unit.keys.items()}
    assert entries == held
    assert not any(unit.readers or unit.is_leaving for unit in slots._units.values())
    assert slots.num_free_units + len(slots._units) == slots.num_units
    assert not [entry for entry in index if entry.is_gone]
