"""D's reads: the spans of a plan, hashed in stages, while they are still in the CPU's cache.

    time         --------------------------------------------------------------->
    pull thread  | stage 1 | stage 2 | stage 3 |          | record |  compare  |
    hash thread            | hash 1  | hash 2  |  hash 3  |
    P's lease    |== its blocks stay as they are ==...====|   ^ generation unchanged?

On a device all is one stage, hashed there when it is here.

The record of P's lease comes last, after every byte: if its generation is still there, P has held
all blocks throughout the read (`wire/lease_record.py`). The record also has P's digests. D asks P
for digests only where the record has none: for blocks that are cut differently, or not hashed yet.
Blocks that differ are read once more. Knows nothing of requests and leases but names.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import NamedTuple

import structlog

from connector.pd.decode.peer_registry import Peer
from connector.pd.decode.pull_plan import Block, PullPlan, coalesce
from connector.pd.metrics import TransferMetrics
from connector.pd.wire.lease_record import (
    HEADER_WORDS,
    MAX_DIGESTS,
    NUM_PLACES,
    NUM_WORDS,
    REGION,
    UNKNOWN,
    WORD_BYTES,
    RecordHeader,
    start_of,
    step_back,
)
from connector.pd.wire.messages import Digests, DigestsQuestion
from connector.transports.base import SpanPair, Transport
from engine.arena import ArenaMemory
from engine.digests import DigestBlocks
from engine.errors import (
    KVTransferParamsError,
    LateReadError,
    OtherPromptError,
    TransportError,
    VerificationError,
)

log = structlog.get_logger()

STAGE_BYTES = 8 << 20
"""Of what was just read this much is in the cache that cores share; measured 2, 4, 8 and 16 MiB.

Smaller stages wake the hashing thread too often.
"""


class Stage(NamedTuple):
    """Blocks that are waited for together; `end`: bytes from the first of all to their last."""

    blocks: Sequence[Block]
    end: int


@dataclass(slots=True)
class Reading:
    """One pull: its peer, the lease it reads under, and the monotonic `deadline` of all of it.

    `holding`: the digest that the lease must have (`params.holding_of`). `post_s`: seconds that
    posting its reads has taken.
    """

    peer: Peer
    request_id: str
    generation: int
    holding: bytes
    deadline: float
    post_s: float = 0.0

    def time_left(self) -> float:
        """Seconds, never below 0."""
        return max(self.deadline - time.monotonic(), 0.0)

    def ask(self, plan: PullPlan) -> list[int]:
        """P's digests of all blocks of `plan`, in order. Raises LateReadError if it freed them."""
        with self.asking(plan) as answer:
            return answer()

    @contextmanager
    def asking(self, plan: PullPlan) -> Iterator[Callable[[], list[int]]]:
        """Asks while D reads, since P has yet to hash: the call for the answer waits."""
        question = DigestsQuestion(
            engine_id=self.peer.engine_id,
            request_id=self.request_id,
            generation=self.generation,
            ranges=tuple(group.asked for group in plan.groups),
        )
        try:
            with self.peer.control.asking_digests(question, self.time_left()) as asked:
                yield lambda: _in_order(asked.result(), plan)
        except KVTransferParamsError as error:
            raise LateReadError(f"the peer no longer holds what was read: {error}") from error


def _in_order(digests: Digests, plan: PullPlan) -> list[int]:
    found, wanted = list(map(len, digests)), [len(group.blocks) for group in plan.groups]
    if found != wanted:
        raise TransportError(f"the peer sent {found} digests for {wanted} blocks")
    return [digest for group in digests for digest in group]


class RecordPlaces:
    """Places in the second half of this node's 64-bit `words`, one for each pull at a time."""

    def __init__(self, words: "memoryview[int]") -> None:
        self._words = words
        places = range(NUM_WORDS, 2 * NUM_WORDS, HEADER_WORDS + MAX_DIGESTS)
        self._free = deque(place * WORD_BYTES for place in places)

    @contextmanager
    def place(self) -> Iterator[int]:
        """Byte offset of an empty place, which nobody else uses within the block."""
        place = self._free.popleft()
        try:
            self._words[place // WORD_BYTES] = 0
            yield place
        finally:
            self._free.append(place)

    def at(self, place: int, num_words: int) -> tuple[RecordHeader, list[int]]:
        """The record that has arrived at a place, as far as it was read: its header and digests."""
        first = place // WORD_BYTES
        words = self._words[first : first + num_words]
        return RecordHeader.read(words), words[HEADER_WORDS:].tolist()


class PullReader:
    """Fills blocks of the local arena from a peer's; safe to use from several threads.

    Owner of the threads that hash, one for each pull.
    """

    def __init__(
        self,
        transport: Transport,
        arena: ArenaMemory,
        records: ArenaMemory,
        *,
        verify: bool,
        metrics: TransferMetrics,
        stage_bytes: int = STAGE_BYTES,
    ) -> None:
        self._transport = transport
        self._arena = arena
        self._places = RecordPlaces(records.host_bytes().cast("Q"))
        self._verify = verify
        self._metrics = metrics
        # A device hashes all at once: a launch costs it more than the bytes of a stage.
        self._stage_bytes = stage_bytes if arena.device_index is None else sys.maxsize
        self._hashing = ThreadPoolExecutor(NUM_PLACES, "kv-hash", initializer=step_back)

    def close(self) -> None:
        """Stops the threads; call after the last read."""
        self._hashing.shutdown()

    def read(self, reading: Reading, plan: PullPlan) -> bool:
        """Returns once all bytes are here and P held them until then; whether they were compared.

        Raises TransportError when they cannot be read, VerificationError when they differ twice,
        LateReadError when P had released them, and OtherPromptError when its lease is for something
        else.
        """
        # Of the blocks that are filled now, some may have just been copied or zeroed by the engine.
        self._arena.wait_for_prepared()
        if self._verify:
            self._read_verified(reading, plan)
        else:
            self._metrics.unverified.inc()
            whole = Stage(plan.blocks, sum(span.length for span in plan.spans))
            self._fetch(reading, plan.spans, [whole], arrived=lambda stage: None)
            self._confirm(reading)
        self._metrics.post_seconds.observe(reading.post_s)
        return self._verify

    def _read_verified(self, reading: Reading, plan: PullPlan) -> None:
        """Reads and compares; blocks that differ are read once more, and P itself is asked."""
        blocks = plan.blocks
        found, expected = self._read_with_digests(reading, plan)
        wrong = self._differing(plan, expected, enumerate(found))
        if wrong:
            self._metrics.verification_retries.inc()
            peer = reading.peer.engine_id
            log.warning("blocks differ from the peer's", peer=peer, num=len(wrong), of=len(found))
            # This time P itself is asked: the record, which was read too, may be what is damaged.
            again = [blocks[number] for number in wrong]
            spans = coalesce(chain.from_iterable(again))
            found = self._read_blocks(reading, again, spans)
            wrong = self._differing(plan, reading.ask(plan), zip(wrong, found, strict=True))
        if wrong:
            raise VerificationError(
                f"{len(wrong)} of {len(blocks)} blocks of {reading.request_id} differ from those "
                f"of {reading.peer.engine_id}, also when read again"
            )
        self._metrics.verified_bytes.inc(plan.attention_bytes + plan.state_bytes)

    def _read_with_digests(self, reading: Reading, plan: PullPlan) -> tuple[list[int], list[int]]:
        """Digests of the bytes that arrived and of those at P, block by block."""
        numbers, num_held = plan.numbers_at_p(), plan.remote.num_blocks
        if numbers is None or num_held > MAX_DIGESTS:
            # P itself is asked, whose record has no digests: P hashes while D reads.
            with reading.asking(plan) as answer:
                found = self._read_blocks(reading, plan.blocks, plan.spans)
                self._confirm(reading)
                return found, answer()
        found = self._read_blocks(reading, plan.blocks, plan.spans)
        recorded = self._confirm(reading, num_held)
        expected = [recorded[number] for number in numbers] if recorded else [UNKNOWN]
        return found, reading.ask(plan) if UNKNOWN in expected else expected

    def _differing(
        self, plan: PullPlan, expected: Sequence[int], found: Iterable[tuple[int, int]]
    ) -> list[int]:
        """The numbers of blocks that did not arrive as P has them; they are counted."""
        wrong = [number for number, digest in found if expected[number] != digest]
        if wrong:
            is_state = [group.is_state for group in plan.groups for _ in group.blocks]
            states = sum(is_state[number] for number in wrong)
            self._metrics.differing("state").inc(states)
            self._metrics.differing("attention").inc(len(wrong) - states)
        return wrong

    def _read_blocks(
        self, reading: Reading, blocks: Sequence[Block], spans: Sequence[SpanPair]
    ) -> list[int]:
        """Digests of what has arrived; another thread hashes a stage while the next one is read."""
        # One stage is hashed here: waking another thread would take longer.
        stages = list(in_stages(blocks, self._stage_bytes))
        come: SimpleQueue[Stage | None] = SimpleQueue()
        hash_all = partial(_hash_as_they_come, self._arena.digests, come)
        hashing = self._hashing.submit(hash_all) if len(stages) > 1 else None
        try:
            self._fetch(reading, spans, stages, arrived=come.put)
        finally:
            # Also after a failed read: the hashing thread must end, and its blocks are ours again.
            come.put(None)
            found = hashing.result() if hashing else hash_all()
        return found

    def _fetch(
        self,
        reading: Reading,
        spans: Sequence[SpanPair],
        stages: Iterable[Stage],
        *,
        arrived: Callable[[Stage], object],
    ) -> None:
        """Reads `spans`, and tells of each stage when it is here."""
        started = time.monotonic()
        transfer = self._transport.read(reading.peer.link, spans)
        reading.post_s += time.monotonic() - started
        try:
            for stage in stages:
                transfer.wait(reading.time_left(), stage.end)
                arrived(stage)
        finally:
            transfer.cancel()

    def _confirm(self, reading: Reading, num_held: int = 0) -> list[int]:
        """Reads the record of P's lease, after all blocks: what P holds now, it has held till now.

        The record also names what P holds, so that no other prompt is read under this one's name.

        Returns the digests of its `num_held` blocks, or none where it has no room for just them.
        Raises LateReadError if P has released it, OtherPromptError if it holds something else.
        """
        peer, num_words = reading.peer, HEADER_WORDS + num_held
        with self._places.place() as place:
            start = start_of(reading.generation) * WORD_BYTES
            record = SpanPair(start, place, num_words * WORD_BYTES)
            self._transport.read(peer.link, [record], REGION).wait(reading.time_left())
            header, digests = self._places.at(place, num_words)
        if header.generation != reading.generation:
            raise LateReadError(
                f"{peer.engine_id} no longer held {reading.request_id} when the read ended"
            )
        if header.holding != reading.holding:
            raise OtherPromptError(
                f"{peer.engine_id} holds another prompt as {reading.request_id}, or in other "
                "blocks than its object names; send P's object as it is"
            )
        return digests if header.num_digests == num_held else []


def in_stages(blocks: Iterable[Block], limit: int) -> Iterator[Stage]:
    """The same blocks in the same order; a stage is full once it has `limit` bytes."""
    stage: list[Block] = []
    start = end = 0
    for block in blocks:
        stage.append(block)
        end += sum(piece.length for piece in block)
        if end - start >= limit:
            yield Stage(stage, end)
            stage, start = [], end
    if stage:
        yield Stage(stage, end)


def _hash_as_they_come(digests: DigestBlocks, come: "SimpleQueue[Stage | None]") -> list[int]:
    """Digests of all blocks of all stages, until None comes."""
    found: list[int] = []
    for stage in iter(come.get, None):
        found += digests([[(it.local, it.length) for it in block] for block in stage.blocks])
    return found
