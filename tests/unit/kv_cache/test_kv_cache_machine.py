"""The KV cache against a brute-force model: a plain record of what every byte would hold.

The model writes, for each attention slot and each state, the whole token prefix that computed it,
and copies it when the manager asks for copies. A hit is right if every slot that it promises holds
exactly the request's own prefix, and longest if a search over plain sets finds none longer.
"""

from collections.abc import Iterable, Mapping
from math import lcm

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.checkpoints import CheckpointPolicy, due
from engine.kv_cache.coordinator import PrefixHit
from engine.kv_cache.coverage import Coverage
from engine.kv_cache.mamba_states import Checkpoint
from engine.kv_cache.manager import KVCacheManager, Pin
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    SlidingWindowSpec,
    StatePart,
)
from engine.kv_cache.tables import NULL_BLOCK
from tests.support.cache.cache_model import (
    Contents,
    Copy,
    HeardCache,
    Live,
    Text,
    longest_start,
    walk,
)
from tests.support.cache.recount import check_cache, evict_all

Tokens = tuple[int, ...]
SMALL_STATE = MambaSpec("gdn", (StatePart((3, 16)), StatePart((2, 8, 8))))
LARGE_STATE = MambaSpec("mamba2", (StatePart((3, 32)), StatePart((2, 16, 8))))
FULL = FullAttentionSpec(1, 8, "float32")
GROUPS = {
    "full": KVCacheGroup(FULL, (0,), 4),
    "coarse": KVCacheGroup(FullAttentionSpec(2, 8, "float32"), (1,), 8),
    "window": KVCacheGroup(SlidingWindowSpec(1, 8, "float32", 6), (2,), 4),
    "wide": KVCacheGroup(SlidingWindowSpec(1, 8, "float32", 13), (3,), 4),
    "state": KVCacheGroup(SMALL_STATE, (4,)),
    "other": KVCacheGroup(LARGE_STATE, (5,)),
}
MIXES = [
    ("full",),
    ("state", "full"),
    ("full", "window", "state"),
    ("coarse", "state", "full"),
    ("other", "window", "full", "state", "wide"),
]
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(tuple)
POSITIONS = st.integers(0, 60)
Offer = tuple[int, tuple[int, ...]]  # leading tokens, and the positions of states
NOTHING: Offer = 0, ()
SOMETHING = st.tuples(POSITIONS, st.lists(POSITIONS, max_size=3).map(tuple))
NOT_EXTERNAL, WHOLE_PROMPT = "nothing", "whole prompt"


class CacheMachine(RuleBasedStateMachine):
    """Requests arrive, compute, are pulled, fail, end and are preempted in any order."""

    @initialize(
        mix=st.sampled_from(MIXES),
        units=st.integers(3, 24),
        step=st.sampled_from([4, 2, 1]),
        data=st.data(),
    )
    def begin(self, mix: tuple[str, ...], units: int, step: int, data: st.DataObject) -> None:
        order = data.draw(st.permutations(mix))
        self.groups = tuple(GROUPS[name] for name in order)
        size = plan_arena(self.groups, 4, 1 << 22).unit_bytes
        self.plan = plan_arena(self.groups, 4, units * size, hash_block_size=step)
        self.contents = Contents(self.plan)
        self.heard = HeardCache(self.plan, self.contents.check_item)
        self.cache = KVCacheManager(
            self.plan,
            checkpoint_share=data.draw(st.sampled_from([0.2, 1.0])),
            listener=self.heard,
        )
        self.hasher = PrefixHasher(step)
        self.pins: list[tuple[Pin, list[tuple[int, Copy]]]] = []
        self.texts: list[Text] = []
        self.waiting: list[Live] = []
        self.live: list[Live] = []

    def note(self, request: Live) -> None:
        for i, digest in enumerate(request.prefix.boundaries()):
            text = (request.salt, tuple(request.tokens[: self.plan.hash_block_size * i]))
            self.heard.learn(digest, text)
        self.texts.append((request.salt, tuple(request.tokens)))

    @rule(
        tokens=PROMPTS,
        salt=st.sampled_from([None, "a"]),
        again=st.data(),
        source=st.sampled_from([NOT_EXTERNAL, WHOLE_PROMPT]) | SOMETHING,
    )
    def arrive(
        self, tokens: Tokens, salt: str | None, again: st.DataObject, source: str | Offer
    ) -> None:
        if self.texts:
            salt, base = again.draw(st.sampled_from(self.texts))
            kept = again.draw(st.integers(0, len(base)))
            tokens = (*base[:kept], *tokens)[:60]
        request = Live([], salt, PrefixDigests(self.hasher, [], salt), len(tokens))
        request.tokens = list(tokens)
        request.prefix = PrefixDigests(self.hasher, request.tokens, salt)
        self.note(request)
        if source == WHOLE_PROMPT:
            source = len(tokens), (len(tokens),)
        self.admit(request, NOTHING if isinstance(source, str) else source)

    def admit(self, request: Live, external: Offer) -> None:
        limit = request.num_prompt if external != NOTHING else len(request.tokens) - 1
        hit = self.cache.find_hit(request.prefix, limit, Coverage.of(*external))
        self.check_longest(request, hit, limit, external)
        is_here = all(local == hit.num_tokens for local in hit.local)
        num_tokens = hit.num_tokens + is_here
        before, fits = self.held(), self.fits(hit, num_tokens)
        tables = self.cache.start(hit, num_tokens)
        assert (tables is not None) == fits
        if tables is None:
            assert before == self.held()
            return
        request.tables, request.computed = tables, hit.num_local
        request.branch_point, request.hit = hit.branch_point, hit.num_tokens
        request.loading = None if is_here else hit
        self.live.append(request)
        self.work()
        self.contents.check_attention(request)
        self.contents.check_states(request, self.local_states(hit), hit.num_tokens)

    def held(self) -> tuple[int, ...]:
        return self.cache.pool.units.num_free_units, *map(len, self.heard.items)

    def fits(self, hit: PrefixHit, num_tokens: int) -> bool:
        """By definition: units in use with the hit shared, and units for what is missing."""
        units, missing = 0, 0
        for group, spec in enumerate(group.spec for group in self.groups):
            used = {b for r in self.live if r.tables for b in r.tables.used(group)}
            used |= self.hit_blocks(hit, group) | self.pinned(group)
            used |= {
                b for c in self.cache.copies() if c.group == group for b in (c.source, c.target)
            }
            per_unit = self.plan.blocks_per_unit[group]
            mine = {block // per_unit for block in used}
            size = self.plan.block_size_of(group)
            need = (
                1 if isinstance(spec, MambaSpec) else -(-num_tokens // size) - hit.num_local // size
            )
            missing += -(-max(0, need - (len(mine) * per_unit - len(used))) // per_unit)
            units += len(mine)
        return units + missing <= self.plan.num_units

    def hit_blocks(self, hit: PrefixHit, group: int) -> set[int]:
        """Blocks of one group that are in use when a request starts from this hit."""
        part = hit.states if self.contents.is_state(group) else hit.attention[group]
        blocks = {block for block in part.blocks if block != NULL_BLOCK}
        if part.source is None:
            return blocks
        run, end = part.source
        if self.contents.is_state(group):
            return {run.blocks[self.plan.state_groups.index(group)]}
        return blocks | {run.blocks[end - run.start - 1]}

    def work(self) -> None:
        """The worker's part of a step: zero, then copy."""
        self.contents.zero_and_copy(self.cache.states.take_new(), self.cache.copies())
        self.cache.copies_done()

    def local_states(self, hit: PrefixHit) -> list[int]:
        return [g for g in self.plan.state_groups if hit.local[g] == hit.num_tokens]

    @precondition(lambda self: any(not r.loading for r in self.live))
    @rule(data=st.data(), count=st.integers(1, 25))
    def compute(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from([r for r in self.live if not r.loading]))
        end = min(request.computed + count, len(request.tokens))
        assert request.tables is not None
        if end == request.computed:
            request.tokens.append(data.draw(st.integers(0, 1)))
            self.note(request)
            end += 1
        if not self.cache.grow(request.tables, end):
            return
        checkpoints = self.reserve(request, end)
        self.work()
        self.contents.write_attention(request, request.computed, end)
        self.contents.write_states(request, self.plan.state_groups, end)
        for checkpoint in checkpoints:
            for group, state in checkpoint.states.items():
                self.contents.write_state(group, state, request.tokens[: checkpoint.num_tokens])
        request.computed = end
        self.cache.publish(request.tables, request.prefix, end)
        self.check_published(request)
        if data.draw(st.booleans()):
            self.cache.publish_checkpoints(request.tables, checkpoints)
        else:
            self.cache.states.drop(checkpoints)

    def check_published(self, request: Live) -> None:
        """All whole blocks of a request can be found while it lives, unless a window passed."""
        specs = {
            g: self.groups[g].spec for g in range(len(self.groups)) if not self.contents.is_state(g)
        }
        if not any(isinstance(spec, SlidingWindowSpec) for spec in specs.values()):
            hit = self.cache.find_hit(request.prefix, request.computed)
            unit = lcm(*map(self.plan.block_size_of, specs))
            assert hit.branch_point >= request.computed // unit * unit

    def reserve(self, request: Live, end: int) -> tuple[Checkpoint, ...]:
        assert request.tables is not None
        request.tables.checkpoints = CheckpointPolicy(tail=6, interval=12).positions(
            request.hit,
            request.branch_point,
            request.num_prompt,
            block_size=self.plan.hash_block_size,
        )
        positions = due(request.tables.checkpoints, request.computed, end)
        return self.cache.reserve_checkpoints(request.prefix, positions)

    @precondition(lambda self: any(r.loading for r in self.live))
    @rule(data=st.data(), ok=st.booleans())
    def load(self, data: st.DataObject, ok: bool) -> None:
        request = data.draw(st.sampled_from([r for r in self.live if r.loading]))
        hit = request.loading
        assert request.tables is not None and hit is not None
        if not ok:
            self.live.remove(request)
            self.cache.free(request.tables)
            self.admit(request, NOTHING)
            return
        # The source has a window's first block whole, or lost its front.
        starts = [0] * len(self.groups)
        for group, spec in enumerate(group.spec for group in self.groups):
            if isinstance(spec, SlidingWindowSpec):
                needed, size = spec.first_needed(hit.num_tokens), self.plan.block_size_of(group)
                starts[group] = data.draw(st.integers(needed // size * size, needed))
        self.contents.write_attention(request, hit.num_local, hit.num_tokens, starts)
        missing = set(self.plan.state_groups) - set(self.local_states(hit))
        self.contents.write_states(request, missing, hit.num_tokens)
        request.loading, request.computed = None, hit.num_tokens
        self.cache.keep_loaded(request.tables, request.prefix, hit.num_tokens, filled_from=starts)
        if data.draw(st.booleans()):
            self.work()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["finish", "preempt", "abort"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        assert request.tables is not None
        if how != "abort" and not request.loading:
            self.cache.retire(request.tables, request.prefix, request.computed)
        self.cache.free(request.tables)
        if how == "preempt":
            self.admit(request, NOTHING)

    @rule()
    def forget(self) -> None:
        evict_all(self.cache)

    @invariant()
    def nobody_writes_into_others(self) -> None:
        for request in self.live:
            self.contents.check_attention(request)
            if not request.loading:
                self.contents.check_states(request, self.plan.state_groups, request.computed)

    @invariant()
    def what_was_told_is_what_is_there(self) -> None:
        assert self.heard.everything() == walk(self.cache.pool)

    def published(self) -> list[dict[Text, int]]:
        """By group, the prefixes that the listener has heard of, and from which token on."""
        states = self.plan.state_groups
        found: list[dict[Text, int]] = [{} for _ in self.groups]
        for group, items in enumerate(self.heard.items):
            for (text, _), item in items.items():
                found[group][text] = min(found[group].get(text, item.filled_from), item.filled_from)
        for group in states:
            found[group] = found[states[0]]
        return found

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        cached = [(group, copy) for group, items in enumerate(self.heard.items) for copy in items]
        if not cached:
            return
        chosen = data.draw(st.lists(st.sampled_from(cached), min_size=1, max_size=4))
        blocks: dict[int, list[int]] = {}
        for group, (_, ids) in chosen:
            blocks.setdefault(group, []).append(ids[0])
        self.pins.append((self.cache.pin(blocks), chosen))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.cache.unpin(pin)

    @invariant()
    def what_is_pinned_stays(self) -> None:
        for _, chosen in self.pins:
            for group, copy in chosen:
                self.contents.check_item(self.heard.items[group][copy], copy[0])

    def pinned(self, group: int) -> set[int]:
        chosen = [each for _, every in self.pins for each in every]
        if not self.contents.is_state(group):
            mine = ((copy, self.heard.items[g][copy]) for g, copy in chosen if g == group)
            return {block for copy, item in mine for block in self.heard.path(copy, item)}
        first, place = self.plan.state_groups[0], self.plan.state_groups.index(group)
        return {ids[place] for g, (_, ids) in chosen if g == first}

    def check_longest(self, request: Live, hit: PrefixHit, limit: int, external: Offer) -> None:
        sets = self.published()
        attention = [g for g in range(len(self.groups)) if not self.contents.is_state(g)]

        def local(groups: Iterable[int], n: int) -> bool:
            return all(self.resumes(sets[g], g, request, n) for g in groups)

        num_tokens, states_at = external
        assert hit.num_tokens == longest_start(
            limit,
            lambda n: n <= num_tokens or local(attention, n),
            lambda n: n in states_at or local(self.plan.state_groups, n),
        )
        assert hit.branch_point == max(n for n in range(limit + 1) if local(attention, n))
        has_states = local(self.plan.state_groups, hit.num_tokens)
        num_local = hit.num_tokens
        if num_local <= num_tokens and not (
            has_states and local(attention, num_local)
        ):  # a load brings whole blocks, and at least one token
            unit = lcm(*map(self.plan.block_size_of, attention))
            num_local = max(n for n in range(0, num_local, unit) if local(attention, n))
        assert hit.local == tuple(
            (hit.num_tokens if has_states else 0) if self.contents.is_state(g) else num_local
            for g in range(len(self.groups))
        )

    def resumes(self, found: Mapping[Text, int], group: int, request: Live, n: int) -> bool:
        """By definition: the state of these n tokens, or all blocks whose tokens are still read."""
        tokens = tuple(request.tokens)
        if self.contents.is_state(group):
            return n == 0 or (request.salt, tokens[:n]) in found
        size = self.plan.block_size_of(group)
        needed: dict[int, int] = {}  # how many tokens the block at each place must hold at least
        first = self.contents.first_read(group, n)
        for position in range(first, n):
            needed[position // size] = position + 1
        return all(
            any(
                found.get((request.salt, tokens[:end]), len(tokens) + 1) <= max(first, place * size)
                for end in range(least, min((place + 1) * size, len(tokens)) + 1)
            )
            for place, least in needed.items()
        )

    @invariant()
    def recount(self) -> None:
        tables = [request.tables for request in self.live if request.tables is not None]
        check_cache(self.cache, tables, [pin for pin, _ in self.pins])

    def teardown(self) -> None:
        for request in self.live:
            assert request.tables is not None
            self.cache.free(request.tables)
        self.work()
        for pin, _ in self.pins:
            self.cache.unpin(pin)
        check_cache(self.cache)
        assert self.cache.usage == 0
        evict_all(self.cache)
        assert self.cache.pool.units.num_free_units == self.plan.num_units
        assert not any(self.heard.items)


# Everyday examples are the same each time; `make test-long` draws others.
EVERYDAY = settings(max_examples=200, stateful_step_count=40)
MANY = settings(max_examples=1000, stateful_step_count=40, derandomize=False)


def test_the_cache_does_as_the_model() -> None:
    run_machine(CacheMachine, settings=EVERYDAY)


@pytest.mark.long
def test_the_cache_does_as_the_model_in_other_runs() -> None:
    run_machine(CacheMachine, settings=MANY)
