"""Checks that hand-overs leave nothing on living nodes but the connection between them.

The account is taken after a first good hand-over, which opens that connection. Pools keep their
threads until a node closes: those are in the account of the cluster fixture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from connector.pd.config import PdConnectorConfig
from connector.pd.connector import PdConnector
from connector.pd.decode.peer_registry import CONNECTING, PeerRegistry
from connector.pd.decode.remote_prefills import RemotePrefills
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.wire.lease_record import NUM_PLACES, NUM_WORDS
from connector.pd.wire.messages import Handshake
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


def peers_of(node: NodeServer) -> PeerRegistry:
    """The nodes that this one pulls from."""
    return claims_of(node)._peers


def identity_of(node: NodeServer) -> Handshake:
    """The node's description of itself in a handshake."""
    return peers_of(node)._identity()


def arena_of(node: NodeServer) -> ArenaMemory:
    """The memory that peers read and that pulls fill."""
    return pd_of(node).reader._arena


class Holding(NamedTuple):
    """How much hand-overs hold on a node; `words`: of lease records, `places`: for records read."""

    leases: int = 0
    claims: int = 0
    words: int = 0
    places: int = 0
    pulls: float = 0.0
    peers_in_use: int = 0


def holdings(node: NodeServer) -> Holding:
    """Counts what hand-overs hold now, but for units of the arena, which `settled` looks at."""
    leases, claims = leases_of(node), claims_of(node)
    stages = (sample(node, "vllm:num_requests_kv_fetch_by_stage", stage=name) for name in STAGES)
    return Holding(
        leases=len(leases.all_held()),
        claims=len(claims.all()),
        words=NUM_WORDS - num_free(leases._records.free),
        places=NUM_PLACES - len(pd_of(node).reader._places._free),
        pulls=sum(stages),
        peers_in_use=sum(bool(peer.users) for peer in peers_of(node).known()),
    )


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
    peers = peers_of(node)
    for peer in peers.known():
        peers.forget(peer)
    for entry in peers._entries.values():
        entry.silent_until = 0.0


async def at_rest(node: NodeServer) -> None:
    """All units free, no request, lease, record, claim or pull, and no peer's mapping in use."""
    await settled(node)
    await until(lambda: not holdings(node).peers_in_use)
    assert holdings(node) == Holding()
