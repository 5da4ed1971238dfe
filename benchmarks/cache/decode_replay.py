"""A decode node's KV cache without a model: what every hand-over has to move. Ids only."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.workloads.traces import Record, Segment, TokenTable
from connector.pd.decode.pull_plan import PullPlan, plan_pull
from connector.pd.layout import SequenceBlocks, blocks_announced
from connector.pd.wire.geometry import geometry_of
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.coverage import Coverage
from engine.kv_cache.listener import CacheListener
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.tables import BlockTables

NOTHING = PullPlan((), (), (), 0, 0, SequenceBlocks(()), ())


@dataclass(slots=True, frozen=True)
class HandOver:
    """A prefilled prompt of `num_prompt` tokens; `prefix` holds the answer too, if it matters."""

    prefix: PrefixDigests
    num_prompt: int
    num_tokens: int


def hand_overs(records: Sequence[Record], hasher: PrefixHasher) -> Iterator[HandOver]:
    """One per record. An answer that no later prompt repeats is left out."""
    answers: dict[int, Segment] = {}
    for record in records:
        if record.parent is not None:
            answers[record.parent] = record.segments[len(records[record.parent].segments)]
    table = TokenTable.for_records(records)
    for line, record in enumerate(records):
        answer = (answers[line],) if line in answers else ()
        tokens = table.tokens((*record.pieces(), *answer))
        yield HandOver(
            PrefixDigests(hasher, tokens, record.cache_salt), record.input_length, len(tokens)
        )


class DecodeNode:
    """One node's cache, driven as the scheduler drives it around a pull.

    Without `remembers` nothing stays for the next hand-over.
    """

    def __init__(
        self, plan: ArenaPlan, *, remembers: bool = True, listener: CacheListener | None = None
    ) -> None:
        self.cache = KVCacheManager(plan, prefix_caching=remembers, listener=listener)

    def serve(self, request: HandOver) -> PullPlan:
        """Pulls what is not here, decodes, lets go; raises RuntimeError when it does not fit."""
        plan, size = self.cache.plan, request.num_prompt
        with self.serving(request) as (tables, local):
            if all(num_tokens == size for num_tokens in local):
                return NOTHING
            nowhere = [(0,) * len(blocks) for blocks in tables.groups]
            return plan_pull(
                plan,
                blocks_announced(plan, geometry_of(plan), nowhere, num_tokens=size),
                tables.groups,
                num_tokens=size,
                ranges=[(num_tokens, size) for num_tokens in local],
            )

    @contextmanager
    def serving(self, request: HandOver) -> Iterator[tuple[BlockTables, Sequence[int]]]:
        """A request's tables and, by group, the tokens that are here: the block pulls the rest.

        Raises RuntimeError when the prompt does not fit.
        """
        cache, size = self.cache, request.num_prompt
        hit = cache.find_hit(request.prefix, size, Coverage.of(size, (size,)))
        if (tables := cache.start(hit, size)) is None:
            raise RuntimeError(f"a prompt of {size} tokens does not fit {cache.plan.arena_bytes}")
        cache.states.take_new()
        cache.copies_done()
        yield tables, hit.local
        if any(local < size for local in hit.local):
            cache.keep_loaded(tables, request.prefix, size)
            cache.copies_done()
        if cache.grow(tables, request.num_tokens):
            cache.retire(tables, request.prefix, request.num_tokens)
        cache.free(tables)
