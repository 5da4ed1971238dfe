"""Sliding-window attention: a token reads only the last ones, so blocks are found one by one.

Blocks behind the window are let go while the request goes on; what is cached may have holes.
"""

from engine.kv_cache.attention_group import NULL_BLOCK, BlockLookup, GroupHit, GroupTable
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.prefix_index import partial_key
from engine.kv_cache.run import Run
from engine.kv_cache.spec import SlidingWindowSpec


class SlidingWindowLookup(BlockLookup):
    """Can resume where all blocks that the next token's window reaches are cached far enough."""

    def __init__(self, pool: BlockPool, prefix: PrefixDigests, group: int) -> None:
        super().__init__(pool, prefix, group)
        self._spec = _spec(pool, group)
        self._found: dict[int, tuple[int, Run] | None] = {}

    def longest(self, limit: int) -> int:
        while limit and (gap := self._last_gap(limit)) is not None:
            limit = gap
        return limit

    def hit(self, num_tokens: int) -> GroupHit:
        num_whole, rest = divmod(num_tokens, self._size)
        first = self._first(num_tokens)
        runs = [self._run(place) for place in range(first, num_whole)]
        blocks = [NULL_BLOCK] * first + [run.blocks[0] for run in runs]
        shares = tuple((run, run.end) for run in runs)
        return GroupHit(blocks, shares, (self._run(num_whole), num_whole + 1) if rest else None)

    def _last_gap(self, num_tokens: int) -> int | None:
        """Where the last block that is not cached far enough for `num_tokens` tokens ends."""
        for place in range((num_tokens - 1) // self._size, self._first(num_tokens) - 1, -1):
            reach = self._reach(place)
            if reach < min(num_tokens, (place + 1) * self._size):
                return reach
        return None

    def _first(self, num_tokens: int) -> int:
        return self._spec.first_needed(num_tokens) // self._size

    def _find_once(self, place: int) -> tuple[int, Run] | None:
        if place not in self._found:
            self._found[place] = self._find(place)
        return self._found[place]

    def _reach(self, place: int) -> int:
        found = self._find_once(place)
        return place * self._size if found is None else found[0]

    def _run(self, place: int) -> Run:
        found = self._find_once(place)
        assert found is not None, f"block {place} is not cached"
        return found[1]


class SlidingWindowTable(GroupTable):
    """Uses the run of each of its blocks that is findable; `_runs` has them by place."""

    def __init__(self, pool: BlockPool, group: int, hit: GroupHit) -> None:
        super().__init__(pool, group, hit)
        self._spec = _spec(pool, group)
        self._runs = {run.start: pool.share(run, end) for run, end in hit.shares}
        self.num_passed = len(hit.blocks) - len(hit.shares)

    def publish(self, prefix: PrefixDigests, num_tokens: int) -> None:
        digests, stride = prefix.boundaries(), self._size // prefix.hash_block_size
        whole = self._pool.indexes[self._group].whole
        for place in range(self.num_published, num_tokens // self._size):
            digest = digests[(place + 1) * stride]
            if digest not in whole:
                self._pool.publish(self._own_run(place), digest)
        self.num_published = max(self.num_published, num_tokens // self._size)

    def publish_partial(self, prefix: PrefixDigests, num_tokens: int) -> None:
        place, rest = divmod(num_tokens, self._size)
        key = partial_key(prefix, num_tokens)
        if rest and self._pool.indexes[self._group].find(key) is None:
            self._pool.publish_partial(self._own_run(place), key)

    def leave(self, num_tokens: int) -> None:
        num_passed = self._spec.first_needed(num_tokens) // self._size
        for place in range(self.num_passed, num_passed):
            block, self.blocks[place] = self.blocks[place], NULL_BLOCK
            run = self._runs.pop(place, None)
            if run is None:
                self._pool.drop(self._group, [block])
            else:
                self._pool.release(run)
        self.num_passed = max(self.num_passed, num_passed)

    def held(self) -> tuple[list[Run], list[int]]:
        places = range(self.num_passed, len(self.blocks))
        own = [self.blocks[place] for place in places if place not in self._runs]
        return [self._runs[place] for place in sorted(self._runs)], own

    def _own_run(self, place: int) -> Run:
        if place not in self._runs:
            self._runs[place] = self._pool.form_run(self._group, place, [self.blocks[place]])
        return self._runs[place]


def _spec(pool: BlockPool, group: int) -> SlidingWindowSpec:
    spec = pool.plan.groups[group].spec
    assert isinstance(spec, SlidingWindowSpec)
    return spec
