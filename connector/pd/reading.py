"""D's reads: the spans of a plan, in stages, each hashed while it is still in the CPU's cache.

What arrived is compared with P's digests block by block; what differs is read once more. Knows
nothing of requests and leases but their names.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from connector.pd.digests import BlockDigester, Chunk
from connector.pd.faults import NO_FAULTS, FaultInjector, FaultPoint, FaultScene
from connector.pd.peers import Peer
from connector.pd.pull_plan import Block, PullPlan, coalesce
from connector.transports.base import SpanPair, Transport
from engine.arena import ArenaMemory
from engine.errors import (
    KVTransferParamsError,
    LateReadError,
    TransportError,
    VerificationError,
)
from engine.metrics import TransferMetrics
from engine.rpc.messages import DIGESTS_XXH3_64, Digests

log = structlog.get_logger()

STAGE_BYTES = 2 << 20
"""Of what was just read this much is still in a core's cache; measured 1, 2, 4, 8 and 256 MiB."""


class Expected(NamedTuple):
    """One attention block or one state: where it goes, and P's digest of it."""

    block: Block
    is_state: bool
    digest: int


class Stage(NamedTuple):
    """What one read fetches, and the order in which it is hashed."""

    spans: Sequence[SpanPair]
    chunks: Sequence[Chunk]


@dataclass(slots=True)
class Reading:
    """One pull: from whom, under which lease, and until which monotonic time.

    `post_s`: what posting its reads has taken.
    """

    peer: Peer
    request_id: str
    generation: int
    deadline: float
    post_s: float = 0.0

    def time_left(self) -> float:
        """Seconds, never below 0."""
        return max(self.deadline - time.monotonic(), 0.0)

    def ask(self, plan: PullPlan) -> Digests:
        """What the bytes of `plan` are. Raises LateReadError when P does not hold them any more."""
        try:
            return self.peer.control.digests(
                self.peer.engine_id,
                self.request_id,
                self.generation,
                ranges=[group.asked for group in plan.groups],
                timeout_s=min(self.time_left(), self.peer.timeout_s),
            )
        except KVTransferParamsError as error:
            raise LateReadError(f"the peer vouches for nothing any more: {error}") from error


class PullReader:
    """Fills blocks of the local arena from a peer's; safe to use from several threads."""

    def __init__(
        self,
        transport: Transport,
        arena: ArenaMemory,
        *,
        verify: bool,
        metrics: TransferMetrics,
        faults: FaultInjector,
        stage_bytes: int = STAGE_BYTES,
    ) -> None:
        self._transport = transport
        self._arena = arena
        self._verify = verify
        self._metrics = metrics
        self._faults = faults
        self._stage_bytes = stage_bytes

    def read(
        self,
        peer: Peer,
        plan: PullPlan,
        *,
        request_id: str,
        generation: int,
        timeout_s: float,
    ) -> bool:
        """Returns once all bytes are here; whether P has vouched for them.

        It has, if nothing forbids it: they are P's, and P held them until the last read had ended.
        `timeout_s` bounds all of it. Raises TransportError when they cannot be read,
        VerificationError when they differ twice, LateReadError when P does not hold them any more.
        """
        reading = Reading(peer, request_id, generation, time.monotonic() + timeout_s)
        verifies = self._verify and not self._cannot_verify(peer)
        if verifies:
            self._read_verified(reading, plan)
        else:
            self._metrics.unverified.inc()
            self._read_spans(reading, plan.spans)
            self._faults.at(FaultPoint.BEFORE_CONFIRM, FaultScene(request_id))
        self._metrics.post_seconds.observe(reading.post_s)
        return verifies

    def _cannot_verify(self, peer: Peer) -> bool:
        """There are no two digests to compare; the reason is logged."""
        reasons = {
            "this node's arena is on a device": self._arena.device_index is not None,
            "the peer computes no digests": DIGESTS_XXH3_64 not in peer.capabilities,
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if found:
            log.warning("a pull is not verified", peer=peer.engine_id, reasons=found)
        return bool(found)

    def _read_verified(self, reading: Reading, plan: PullPlan) -> None:
        """What differs is read once more."""
        blocks = [block for group in plan.groups for block in group.blocks]
        found, expected = self._read_and_ask(reading, plan, blocks)
        wrong = self._differing(expected, enumerate(found))
        if wrong:
            self._metrics.verification_retries.inc()
            peer = reading.peer.engine_id
            log.warning("blocks differ from the peer's", peer=peer, num=len(wrong), of=len(found))
            self._read_again(reading, plan, {number: expected[number].block for number in wrong})
        self._metrics.verified_bytes.inc(plan.attention_bytes + plan.state_bytes)

    def _read_again(self, reading: Reading, plan: PullPlan, blocks: Mapping[int, Block]) -> None:
        found, expected = self._read_and_ask(reading, plan, blocks.values())
        still = self._differing(expected, zip(blocks, found, strict=True))
        if still:
            raise VerificationError(
                f"{len(still)} of {len(expected)} blocks of {reading.request_id} differ from those "
                f"of {reading.peer.engine_id}, also when read again"
            )

    def _read_and_ask(
        self, reading: Reading, plan: PullPlan, blocks: Iterable[Block]
    ) -> tuple[list[int], list[Expected]]:
        """Digests of what has arrived, and P's of everything.

        P answers only while it holds the bytes, and is asked behind the last read.
        """
        found = self._read_blocks(reading, blocks)
        self._faults.at(FaultPoint.BEFORE_CONFIRM, FaultScene(reading.request_id))
        return found, _expected(plan, reading.ask(plan))

    def _differing(
        self, expected: Sequence[Expected], found: Iterable[tuple[int, int]]
    ) -> list[int]:
        """The numbers of blocks that did not arrive as P has them; they are counted."""
        wrong = [number for number, digest in found if expected[number].digest != digest]
        states = sum(expected[number].is_state for number in wrong)
        self._metrics.differed("state", states)
        self._metrics.differed("attention", len(wrong) - states)
        return wrong

    def _read_blocks(self, reading: Reading, blocks: Iterable[Block]) -> list[int]:
        """Reads and returns the digests of what has arrived."""
        stages = list(in_stages(blocks, self._stage_bytes))
        digester = BlockDigester(self._arena.host_bytes())
        for stage in stages:
            self._read_spans(reading, stage.spans)
            digester.add(stage.chunks)
        return digester.done

    def _read_spans(self, reading: Reading, spans: Sequence[SpanPair]) -> None:
        self._touch(FaultPoint.BEFORE_READ, reading, spans)
        started = time.monotonic()
        transfer = self._transport.read(reading.peer.engine_id, spans)
        reading.post_s += time.monotonic() - started
        try:
            transfer.wait(reading.time_left())
        except TransportError:
            transfer.cancel()
            raise
        self._touch(FaultPoint.AFTER_READ, reading, spans)

    def _touch(self, point: FaultPoint, reading: Reading, spans: Sequence[SpanPair]) -> None:
        if self._faults is not NO_FAULTS:
            memory = self._arena.host_bytes()
            self._faults.at(point, FaultScene(reading.request_id, spans, memory))


def in_stages(blocks: Iterable[Block], limit: int) -> Iterator[Stage]:
    """The same bytes in the same order, in stages of at most `limit` bytes."""
    spans: list[SpanPair] = []
    chunks: list[Chunk] = []
    room = limit
    for span, ends_block in (cut for block in blocks for cut in _cut(block, limit)):
        if span.length > room:
            yield Stage(coalesce(spans), chunks)
            spans, chunks, room = [], [], limit
        spans.append(span)
        chunks.append(Chunk(span.local, span.local + span.length, ends_block))
        room -= span.length
    if spans:
        yield Stage(coalesce(spans), chunks)


def _cut(block: Block, limit: int) -> Iterator[tuple[SpanPair, bool]]:
    """Pieces that fit into a stage, and whether each is the last of its block."""
    last = len(block) - 1
    for number, piece in enumerate(block):
        if piece.length <= limit:
            yield piece, number == last
            continue
        for start in range(0, piece.length, limit):
            length = min(limit, piece.length - start)
            span = SpanPair(piece.remote + start, piece.local + start, length)
            yield span, number == last and start + length == piece.length


def _expected(plan: PullPlan, digests: Digests) -> list[Expected]:
    """Every block of the plan with P's digest, in the plan's order."""
    asked_for = [len(group.blocks) for group in plan.groups]
    if [len(blocks) for blocks in digests] != asked_for:
        raise TransportError(
            f"the peer sent {[len(blocks) for blocks in digests]} digests for {asked_for} blocks"
        )
    return [
        Expected(block, group.is_state, digest)
        for group, theirs in zip(plan.groups, digests, strict=True)
        for block, digest in zip(group.blocks, theirs, strict=True)
    ]
