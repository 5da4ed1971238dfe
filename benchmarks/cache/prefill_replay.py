"""A prefill node's KV cache without a model: the real manager, driven as the scheduler drives it.

Ids only, no bytes move. Prompts are served one after another, each prefilled in chunks, its state
at the end kept by `retire`; nothing takes time, so what was computed is findable at once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.workloads.traces import Record, TokenTable, ideal_hits
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.checkpoints import INTERVAL, TAIL, due
from engine.kv_cache.listener import CacheListener
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.sched.planning import plan_prefill_chunk

CHUNK = 2048  # a node's default max_num_batched_tokens


@dataclass(slots=True, frozen=True)
class Arrival:
    """Facts that a checkpoint policy knows when a prompt starts."""

    num_hit_tokens: int
    branch_point: int
    num_tokens: int
    hash_block_size: int

    @property
    def last(self) -> int:
        """The last hash boundary before the last token."""
        return (self.num_tokens - 1) // self.hash_block_size * self.hash_block_size

    def strided(self, interval: int) -> range:
        """Multiples of `interval` before `last`."""
        return range(interval, self.last, interval)


Policy = Callable[[Arrival], Iterable[int]]


def _fixed(new: Arrival) -> Iterable[int]:
    size = new.hash_block_size
    spread = (new.last, new.last - TAIL, *new.strided(INTERVAL))
    return (new.branch_point, *(position // size * size for position in spread))


FIXED = "last, branch point, tail, every 16,384"
POLICIES: Mapping[str, Policy | None] = MappingProxyType(
    {
        "default": None,  # what the node itself learns
        FIXED: _fixed,
        "last": lambda new: (new.last,),
        "last, branch point": lambda new: (new.last, new.branch_point),
        "last, every 2,048": lambda new: (new.last, *new.strided(2048)),
        "last, branch point, every 8,192": lambda new: (
            new.last,
            new.branch_point,
            *new.strided(8192),
        ),
        "every 512": lambda new: new.strided(512),
    }
)


@dataclass(slots=True, frozen=True)
class Prompt:
    """A prompt whose digests are computed once for all replays; `ideal`: tokens that could hit."""

    prefix: PrefixDigests
    num_tokens: int
    ideal: int


def prompts_of(records: list[Record], hash_block_size: int) -> list[Prompt]:
    """Prompts in order of arrival."""
    table, hasher = TokenTable.for_records(records), PrefixHasher(hash_block_size)
    prefixes = (
        PrefixDigests(hasher, table.tokens(record.pieces()), record.cache_salt)
        for record in records
    )
    return [
        Prompt(prefix, record.input_length, ideal)
        for prefix, record, ideal in zip(prefixes, records, ideal_hits(records), strict=True)
    ]


@dataclass(slots=True)
class Tally:
    """Sums over prompts. `lost`: tokens whose attention blocks were there but no state."""

    requests: int = 0
    refused: int = 0
    tokens: int = 0
    hits: int = 0
    ideal: int = 0
    lost: int = 0
    writes: int = 0

    @property
    def hit_share(self) -> float:
        """Hit tokens of all tokens."""
        return self.hits / self.tokens

    @property
    def of_ideal(self) -> float:
        """Hit tokens of those that could hit with endless memory and a state everywhere."""
        return self.hits / self.ideal if self.ideal else 1.0

    @property
    def writes_per_request(self) -> float:
        """Checkpoints copied out while prefilling; the end state that is kept costs no copy."""
        return self.writes / self.requests


class PrefillNode:
    """One node's cache and what its prompts found there."""

    def __init__(
        self,
        plan: ArenaPlan,
        policy: Policy | None,
        *,
        chunk: int = CHUNK,
        listener: CacheListener | None = None,
    ) -> None:
        self.cache = KVCacheManager(plan, listener=listener)
        self.tally = Tally()
        self._policy = policy
        self._chunk = chunk

    def serve(self, prompt: Prompt) -> int:
        """Prefills one prompt and lets it go; its hit in tokens. Too long ones are refused."""
        prefix, size, tally = prompt.prefix, prompt.num_tokens, self.tally
        hit = self.cache.find_hit(prefix, size - 1)
        tally.requests += 1
        tally.tokens += size
        tally.ideal += prompt.ideal
        if (tables := self.cache.start(hit, size)) is None:
            tally.refused += 1
            return 0
        tally.hits += hit.num_tokens
        tally.lost += hit.branch_point - hit.num_tokens
        self.cache.states.take_new()
        self.cache.plan_checkpoints(tables, hit, size)
        wanted: Iterable[int] = tables.checkpoints
        if self._policy is not None:
            at = Arrival(hit.num_tokens, hit.branch_point, size, self.cache.hasher.hash_block_size)
            wanted = sorted({p for p in self._policy(at) if hit.num_tokens < p <= at.last})
        end = hit.num_tokens
        while end < size:
            start, end = end, end + plan_prefill_chunk(end, size, size, budget=self._chunk)
            kept = self.cache.reserve_checkpoints(prefix, due(wanted, start, end))
            self.cache.copies_done()
            self.cache.publish(tables, prefix, end)
            self.cache.publish_checkpoints(tables, kept)
            tally.writes += len(kept)
        self.cache.retire(tables, prefix, size)
        self.cache.free(tables)
        return hit.num_tokens


def replay(
    prompts: Iterable[Prompt], plan: ArenaPlan, policy: Policy | None, *, chunk: int = CHUNK
) -> Tally:
    """All prompts on one node whose cache starts empty."""
    node = PrefillNode(plan, policy, chunk=chunk)
    for prompt in prompts:
        node.serve(prompt)
    return node.tally
