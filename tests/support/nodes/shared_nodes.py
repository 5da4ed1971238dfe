"""Nodes of one test, and nodes that tests share: those are lent empty, with counters at zero.

What stays from test to test is what peers keep for one another: connections, and what they know.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from connector.pd.decode.pull_reader import STAGE_BYTES
from serving.node.server import NodeServer
from tests.support.cache.recount import evict_all
from tests.support.faults.fault_points import NO_FAULTS, FaultInjector
from tests.support.faults.faults import Armed
from tests.support.nodes.accounts import at_rest
from tests.support.nodes.cluster import Cluster, all_back, close_all, count_from_here
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.leaks import Holdings, assert_no_orphans_but, held_here, orphans

MAX_IDLE = 6


@dataclass(slots=True)
class SharedNode:
    """A node, and what a test may break in it."""

    settings: str
    node: NodeServer
    faults: Armed
    in_use: bool = False


@dataclass(slots=True)
class SharedNodes(Cluster):
    """Hands out a node to one test after the other; `lent` has the one that was idle longest first.

    For tests that neither close nor kill a node, and whose peers do not outlive them.
    """

    lent: list[SharedNode] = field(default_factory=list)
    before: Holdings = field(default_factory=Holdings)
    names: set[str] = field(default_factory=set)

    async def start(
        self,
        kind: str,
        model: Path,
        *,
        faults: FaultInjector = NO_FAULTS,
        stage_bytes: int = STAGE_BYTES,
        **changes: object,
    ) -> NodeServer:
        """A node with these settings that this test does not have yet, old or new."""
        if not self.lent:
            self.before, self.names = held_here(), orphans()
        settings = f"{kind} {model} {stage_bytes} {sorted(changes.items())}"
        idle = (one for one in self.lent if one.settings == settings and not one.in_use)
        found = next(idle, None)
        if found is None:
            armed = Armed()
            node = await Cluster.start(
                self, kind, model, faults=armed, stage_bytes=stage_bytes, **changes
            )
            found = SharedNode(settings, node, armed)
            self.lent.append(found)
        found.in_use = True
        found.faults.inner = faults
        count_from_here(found.node)
        return found.node

    async def take_back(self) -> None:
        """Nothing may stay on a node that was lent; one on which something does is closed."""
        used = [one for one in self.lent if one.in_use]
        try:
            for one in used:
                one.faults.inner = NO_FAULTS
                await at_rest(one.node)
                cache = one.node.engine.core.scheduler.cache
                await run_in_engine(one.node.engine, partial(evict_all, cache))
        except BaseException:
            await self._close(used)
            raise
        self.lent = [one for one in self.lent if not one.in_use] + used
        for one in used:
            one.in_use = False
        await self._close(self.lent[:-MAX_IDLE])

    async def close(self) -> None:
        """All are gone, with everything that they held."""
        if self.lent:
            await self._close(self.lent)
            await all_back(self.before)
            assert_no_orphans_but(self.names)

    async def _close(self, some: list[SharedNode]) -> None:
        self.lent = [one for one in self.lent if one not in some]
        for one in some:
            self.nodes.remove(one.node)
        await close_all([one.node for one in some])


@pytest.fixture(scope="module")
async def shared_nodes(warm: None) -> AsyncIterator[SharedNodes]:
    """Nodes that any test of a file may borrow through `shared`."""
    made = SharedNodes([])
    yield made
    await made.close()


@pytest.fixture
async def shared(shared_nodes: SharedNodes) -> AsyncIterator[Cluster]:
    """As `cluster`, with nodes that other tests had before and will have again."""
    yield shared_nodes
    await shared_nodes.take_back()


@pytest.fixture
async def cluster(shared_nodes: SharedNodes) -> AsyncIterator[Cluster]:
    """A cluster whose nodes must be empty at the end, and gone after it; no others live then."""
    await shared_nodes.close()
    before, names = held_here(), orphans()
    made = Cluster([])
    try:
        yield made
    finally:
        await close_all(made.nodes)
        made.nodes.clear()
    await all_back(before)
    assert_no_orphans_but(names)
