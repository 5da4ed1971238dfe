"""D's reads: the spans of a plan, in stages, each hashed while it is still in the CPU's cache.

Behind the last one comes the word of P's lease, which proves that P held them all. What arrived is
compared with P's digests block by block; what differs is read once more. Knows nothing of requests
and leases but their names.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import structlog

from connector.pd.digests import BlockDigester, Chunk
from connector.pd.faults import NO_FAULTS, FaultInjector, FaultPoint, FaultScene
from connector.pd.lease_words import NUM_PLACES, WORD_BYTES, WordPlaces, offset_of
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
from engine.rpc.messages import DIGESTS_XXH3_64

log = structlog.get_logger()

STAGE_BYTES = 8 << 20
"""Of what was just read this much is still in a core's cache; measured 1, 2, 4, 8 and 256 MiB."""


class Stage(NamedTuple):
    """Spans that are waited for together, and the order in which their bytes are hashed."""

    spans: Sequence[SpanPair]
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        """Bytes of all spans."""
        return sum(span.length for span in self.spans)


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

    def ask(self, plan: PullPlan) -> list[int]:
        """P's digest of every block of `plan`, in its order.

        Raises LateReadError when P does not hold them any more.
        """
        try:
            digests = self.peer.control.digests(
                self.peer.engine_id,
                self.request_id,
                self.generation,
                ranges=[group.asked for group in plan.groups],
                timeout_s=min(self.time_left(), self.peer.timeout_s),
            )
        except KVTransferParamsError as error:
            raise LateReadError(f"the peer vouches for nothing any more: {error}") from error
        found, wanted = list(map(len, digests)), [len(group.blocks) for group in plan.groups]
        if found != wanted:
            raise TransportError(f"the peer sent {found} digests for {wanted} blocks")
        return [digest for group in digests for digest in group]


class PullReader:
    """Fills blocks of the local arena from a peer's; safe to use from several threads.

    Owner of the threads that help: for each pull one to ask P, and one to hash.
    """

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
        self._places = WordPlaces(arena)
        self._verify = verify
        self._metrics = metrics
        self._faults = faults
        self._stage_bytes = stage_bytes
        self._threads = ThreadPoolExecutor(2 * NUM_PLACES, thread_name_prefix="kv-verify")

    def close(self) -> None:
        """Stops the threads; call when nothing is read any more."""
        self._threads.shutdown()

    def read(
        self,
        peer: Peer,
        plan: PullPlan,
        *,
        request_id: str,
        generation: int,
        timeout_s: float,
    ) -> bool:
        """Returns once all bytes are here and P held them until then; whether they were compared.

        `timeout_s` bounds all of it. Raises TransportError when they cannot be read,
        VerificationError when they differ twice, LateReadError when P held them no more.
        """
        reading = Reading(peer, request_id, generation, time.monotonic() + timeout_s)
        verifies = self._verify and not self._cannot_verify(peer)
        if verifies:
            self._read_verified(reading, plan)
        else:
            self._metrics.unverified.inc()
            self._fetch(reading, [Stage(plan.spans, ())], arrived=lambda chunks: None)
            self._confirm(reading)
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
        """P is asked at once and hashes what it has not hashed yet while D reads.

        What differs is read once more.
        """
        blocks = [block for group in plan.groups for block in group.blocks]
        asked = self._threads.submit(reading.ask, plan)
        try:
            found = self._read_blocks(reading, blocks)
        finally:
            wait([asked])  # it has a deadline; nothing of a pull outlives it
        expected = asked.result()
        wrong = self._differing(plan, expected, enumerate(found))
        if wrong:
            self._metrics.verification_retries.inc()
            peer = reading.peer.engine_id
            log.warning("blocks differ from the peer's", peer=peer, num=len(wrong), of=len(found))
            found = self._read_blocks(reading, [blocks[number] for number in wrong])
            wrong = self._differing(plan, expected, zip(wrong, found, strict=True))
        if wrong:
            raise VerificationError(
                f"{len(wrong)} of {len(blocks)} blocks of {reading.request_id} differ from those "
                f"of {reading.peer.engine_id}, also when read again"
            )
        self._metrics.verified_bytes.inc(plan.attention_bytes + plan.state_bytes)

    def _differing(
        self, plan: PullPlan, expected: Sequence[int], found: Iterable[tuple[int, int]]
    ) -> list[int]:
        """The numbers of blocks that did not arrive as P has them; they are counted."""
        wrong = [number for number, digest in found if expected[number] != digest]
        if wrong:
            is_state = [group.is_state for group in plan.groups for _ in group.blocks]
            states = sum(is_state[number] for number in wrong)
            self._metrics.differed("state", states)
            self._metrics.differed("attention", len(wrong) - states)
        return wrong

    def _read_blocks(self, reading: Reading, blocks: Iterable[Block]) -> list[int]:
        """Digests of what has arrived; another thread hashes a stage while the next one is read."""
        stages = list(in_stages(blocks, self._stage_bytes))
        come: SimpleQueue[Sequence[Chunk] | None] = SimpleQueue()
        digester = BlockDigester(self._arena.host_bytes())
        follow = partial(digester.follow, come)
        hashing = self._threads.submit(follow) if len(stages) > 1 else None
        try:
            self._fetch(reading, stages, arrived=come.put)
        finally:
            come.put(None)
            hashing.result() if hashing else follow()
        self._confirm(reading)
        return digester.done

    def _fetch(
        self,
        reading: Reading,
        stages: Sequence[Stage],
        *,
        arrived: Callable[[Sequence[Chunk]], None],
    ) -> None:
        """Reads all stages, and tells of each when it is here."""
        spans = [span for stage in stages for span in stage.spans]
        self._touch(FaultPoint.BEFORE_READ, reading, spans)
        started = time.monotonic()
        transfer = self._transport.read(reading.peer.engine_id, spans)
        reading.post_s += time.monotonic() - started
        here = 0
        try:
            for stage in stages:
                here += stage.nbytes
                transfer.wait(reading.time_left(), here)
                self._touch(FaultPoint.AFTER_READ, reading, stage.spans)
                arrived(stage.chunks)
        finally:
            transfer.cancel()

    def _confirm(self, reading: Reading) -> None:
        """The word of P's lease is read behind all blocks: what P holds now, it has held till now.

        Raises LateReadError when it does not.
        """
        self._faults.at(FaultPoint.BEFORE_CONFIRM, FaultScene(reading.request_id))
        peer, generation = reading.peer, reading.generation
        with self._places.place() as place:
            word = SpanPair(offset_of(generation, peer.lease_words), place, WORD_BYTES)
            self._transport.read(peer.engine_id, [word]).wait(reading.time_left())
            found = self._places.at(place)
        if found != generation:
            raise LateReadError(
                f"{peer.engine_id} held {reading.request_id} no more when the read ended"
            )

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
