"""Order of a hand-over between two devices whose work happens late, and in any order.

    P's host    launch | results read | grant, hash    D's host  prepare | pull, verify | launch
    P's engine    |=== step ===|                       D's engine | copy, zero |           | step |
    P's side                            | digests |    D's side              | copies, digests |

The connector, its transport and its threads are the real ones; device and driver are played
(`stream_arena`). What each step reads is compared with what P's step wrote.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from connector.transports.base import SpanPair, Transfer, Transport
from connector.transports.cuda_ipc import CudaIpcTransfer
from engine.errors import VerificationError
from tests.support.cache.bare_pulls import LOCAL, PAGES, PLAN, REMOTE, STATE, Pair, pair
from tests.support.cache.leases import HOLDING
from tests.support.nodes.stream_arena import Device, SharedIpc, StreamArena

SEEDS = range(6)
MANY = range(40)
"""Of which one at least meets the planted bug: an order is drawn for each."""


def arenas(nodes: Pair) -> tuple[StreamArena, StreamArena]:
    assert isinstance(nodes.p, StreamArena) and isinstance(nodes.d, StreamArena)
    return nodes.p, nodes.d


def offsets(tables: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """(offset, bytes) of all blocks of a sequence, and its state."""
    return [
        (PLAN.block_offset(group, block), PLAN.block_bytes(group))
        for group in (PAGES, STATE)
        for block in tables[group]
    ]


def launch_step(p: StreamArena, generator: torch.Generator) -> list[torch.Tensor]:
    """P computes its blocks: each is a piece of work, and the last one yields the result."""
    written = []
    for offset, nbytes in offsets(REMOTE):
        content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        p.engine.do(partial(p.tensor[offset : offset + nbytes].copy_, content))
        written.append(content)
    return written


def prepare(d: StreamArena, *, marks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """D's engine copies a block whose room the load takes, and zeroes what it fills.

    Then it goes on with its step. Returns the block as it was, and where its copy comes.
    """
    start, length = offsets(LOCAL)[0]
    before = d.tensor[start : start + length].clone()
    copied = torch.empty_like(before)
    d.engine.do(lambda: copied.copy_(d.tensor[start : start + length]))
    for offset, nbytes in offsets(LOCAL):
        d.engine.do(d.tensor[offset : offset + nbytes].zero_)
    if marks:
        d.mark_prepared()
    d.engine.do(*[lambda: None] * 5)
    return before, copied


def look(block: torch.Tensor, found: list[torch.Tensor]) -> None:
    found.append(block.clone())


def read_in_step(d: StreamArena) -> Callable[[], list[torch.Tensor]]:
    """D's next step reads all blocks; the call waits for its results."""
    found: list[torch.Tensor] = []
    for offset, nbytes in offsets(LOCAL):
        block = d.tensor[offset : offset + nbytes]
        d.engine.do(partial(look, block, found))
    event = d.engine.record()

    def results() -> list[torch.Tensor]:
        event.synchronize()
        return found

    return results


class Come:
    """Copies that have ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class PastStreams(SharedIpc):
    """Writes into the arena by itself, as NIXL does, and knows no mark."""

    def _start(self, remote: Any, spans: Sequence[SpanPair], region: int) -> Transfer:
        if region:
            return super()._start(remote, spans, region)
        target, source = self._regions[region].tensor, remote.regions[region].content
        for start, to, length in spans:
            target[to : to + length] = source[start : start + length]
        return CudaIpcTransfer(remote, sum(span.length for span in spans), Come())


async def hand_over(
    seed: int,
    *,
    verify: bool,
    awaits: bool = True,
    marks: bool = True,
    kind: Callable[[str], Transport] = SharedIpc,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Blocks as P's step wrote and as D's step read them; one that D copied, before and after.

    `awaits`: P reads its step's results before it grants the lease.
    """
    gpu, generator = Device(seed), torch.Generator().manual_seed(seed)
    make = partial(StreamArena, device=gpu)
    async with pair(make_arena=make, make_transport=kind) as nodes:
        p, d = arenas(nodes)
        written = launch_step(p, generator)
        results = p.engine.record()
        if awaits:
            results.synchronize()
        nodes.leases.grant("r", REMOTE, 64, holding=HOLDING)
        hashing = nodes.hash_ahead() if seed % 2 else asyncio.sleep(0)
        before, copied = prepare(d, marks=marks)
        plan = nodes.plan()
        await asyncio.gather(hashing, nodes.read(plan, verify=verify, timeout_s=30.0))
        read = read_in_step(d)()
        return [*written, before], [*read, copied]


def equal(written: list[torch.Tensor], read: list[torch.Tensor]) -> bool:
    return all(torch.equal(*both) for both in zip(written, read, strict=True))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", [SharedIpc, PastStreams])
async def test_no_byte_is_read_too_early(kind: type[SharedIpc], verify: bool) -> None:
    for seed in SEEDS:
        assert equal(*await hand_over(seed, verify=verify, kind=kind)), seed


async def caught(**bug: Any) -> bool:
    """True if one of the seeds shows the bug, in a step of D or by the digests."""
    for seed in MANY:
        try:
            if not equal(*await hand_over(seed, **bug)):
                return True
        except VerificationError:
            return True
    return False


@pytest.mark.parametrize("verify", [True, False])
async def test_a_lease_granted_before_results_are_read_would_be_seen(verify: bool) -> None:
    assert await caught(verify=verify, awaits=False)


@pytest.mark.parametrize("kind", [SharedIpc, PastStreams])
async def test_a_load_that_does_not_wait_for_the_mark_would_be_seen(
    kind: type[SharedIpc],
) -> None:
    assert await caught(verify=True, marks=False, kind=kind)


async def test_blocks_published_before_the_copies_have_ended_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def believe(transfer: CudaIpcTransfer, wanted: int) -> None:
        transfer._ended(None)

    monkeypatch.setattr(CudaIpcTransfer, "_advance", believe)
    assert await caught(verify=False)
