"""Checks that hand-overs leave nothing on living nodes but the connection between them.

The account is taken after a first good hand-over, which opens that connection. Pools keep their
threads until a node closes: those are in the account of the cluster fixture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from connector.pd.config import PdConnectorConfig
from connector.pd.connector import PdConnector
from connector.pd.decode.peer_registry import CONNECTING
from connector.pd.decode.pull_reader import PullReader
from connector.pd.decode.remote_prefills import RemotePrefills
from connector.pd.prefill.lease_records import LeaseRecords
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.wire.lease_record import NUM_PLACES, NUM_WORDS
from engine.arena import ArenaMemory
from serving.node.server import NodeServer
from tests.support.cache.leases import num_free
from tests.support.nodes.cluster import all_back, sample, settled, until
from tests.support.nodes.leaks import Holdings, held_here

THREADS_PER_NODE = 3 + CONNECTING + 2 * PdConnectorConfig().max_concurrent_pulls
STAGES = ("waiting_to_start", "in_progress", "completed_waiting")


def pd_of(node: NodeServer) -> PdConnector:
    """The node's connector, which is not one of several."""
    assert isinstance(node.connector, PdConnector)
    return node.connector


def leases_of(node: NodeServer) -> LeaseTable:
    """The leases that the node has granted."""
    return pd_of(node).leases


def claims_of(node: NodeServer) -> RemotePrefills:
    """The remote prefills that the node has claimed."""
    return pd_of(node).remote


def records_of(node: NodeServer) -> LeaseRecords:
    """The lease records that readers see."""
    return leases_of(node)._records


def reader_of(node: NodeServer) -> PullReader:
    """The reader that fills the node's blocks from its peers'."""
    return pd_of(node).reader


def arena_of(node: NodeServer) -> ArenaMemory:
    """The memory that peers read and that pulls fill."""
    return reader_of(node)._arena


@dataclass(slots=True)
class Account:
    """The process's descriptors, mappings, segments, children and tasks while nodes live in it."""

    nodes: tuple[NodeServer, ...]
    start: Holdings

    @classmethod
    async def open(cls, *nodes: NodeServer, spare: Mapping[str, int] | None = None) -> Self:
        """Records what nodes at rest hold now; `spare` may be kept for a while."""
        for node in nodes:
            await at_rest(node)
        start = held_here() + Holdings(spare or {})
        start["thread"] = THREADS_PER_NODE * len(nodes)
        return cls(nodes, start)

    async def close(self) -> None:
        """Asserts that nodes are at rest again and hold no more than at the start."""
        for node in self.nodes:
            await at_rest(node)
        await all_back(self.start)


def forget_peers(node: NodeServer) -> None:
    """The next claim shakes hands again, at once even where there was silence until now."""
    peers = claims_of(node)._peers
    for peer in peers.known():
        peers.forget(peer)
    for entry in peers._entries.values():
        entry.silent_until = 0.0


async def at_rest(node: NodeServer) -> None:
    """All units free, no request, lease, record, claim or pull, and no peer's mapping in use."""
    await settled(node)
    peers = claims_of(node)._peers
    await until(lambda: not any(peer.users for peer in peers.known()))
    assert (leases_of(node).all_held(), claims_of(node).all()) == ([], [])
    assert num_free(records_of(node).free) == NUM_WORDS
    assert len(reader_of(node)._places._free) == NUM_PLACES
    stages = (sample(node, "vllm:num_requests_kv_fetch_by_stage", stage=name) for name in STAGES)
    assert sum(stages) == 0
