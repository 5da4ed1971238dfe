"""The transferred cases: prompts of a real model, and plain sizes in equal spans.

Both are pulls of real arena plans; torch-free, so that both processes make the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from connector.pd.decode.pull_plan import PullPlan, plan_pull
from connector.pd.layout import blocks_announced
from connector.pd.wire.geometry import geometry_of
from connector.pd.wire.messages import BlockIds
from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec, StatePart

BLOCK_SIZE = 16
ARENA_BYTES = 1400 << 20
GDN = MambaSpec("gdn", (StatePart((3, 8192), "bfloat16"), StatePart((32, 128, 128))))
ATTENTION = FullAttentionSpec(num_kv_heads=4, head_dim=256, dtype="bfloat16")
GROUPS = (
    KVCacheGroup(GDN, tuple(layer for layer in range(32) if layer % 4 != 3)),
    KVCacheGroup(ATTENTION, tuple(range(3, 32, 4))),
)
KIB, MIB = 1 << 10, 1 << 20
Tables = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Case:
    """A held prefill: P's blocks and D's, by number. `name` is also the request's."""

    name: str
    plan: ArenaPlan
    remote: BlockIds
    local: Tables
    num_tokens: int

    def pull(self) -> PullPlan:
        """The plan that a pull thread makes."""
        plan, tokens = self.plan, self.num_tokens
        remote = blocks_announced(plan, geometry_of(plan), self.remote, num_tokens=tokens)
        return plan_pull(
            plan, remote, self.local, num_tokens=tokens, ranges=[(0, tokens)] * len(plan.groups)
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one pull."""
        return sum(span.length for span in self.pull().spans)


def prompts() -> list[Case]:
    """Prompts of Qwen3.5-4B in bfloat16: 32 KiB per token and 51.5 MB of state."""
    plan = plan_arena(GROUPS, BLOCK_SIZE, ARENA_BYTES)
    return [
        _prompt("1,700 tokens", plan, 1_700, chunk=2_048),
        _prompt("1,700 tokens, worst layout", plan, 1_700, chunk=16),
        _prompt("16k tokens, chunked beside another", plan, 16_384, chunk=2_048),
    ]


def sizes() -> list[Case]:
    """4 KiB to 256 MiB, in one span and in several."""
    return [
        _sized(4 * KIB, 4 * KIB),
        _sized(64 * KIB, 64 * KIB),
        _sized(MIB, MIB),
        _sized(MIB, 64 * KIB),
        _sized(16 * MIB, 16 * MIB),
        _sized(16 * MIB, MIB),
        _sized(16 * MIB, 64 * KIB),
        _sized(256 * MIB, MIB),
    ]


def _prompt(name: str, plan: ArenaPlan, tokens: int, *, chunk: int) -> Case:
    """D reserves in one go; P grew the tables chunk by chunk, in turn with another prompt."""
    remote = tuple(map(tuple, _tables(plan, tokens, chunk)))
    return Case(name, plan, remote, _tables(plan, tokens, tokens), tokens)


def _tables(plan: ArenaPlan, tokens: int, chunk: int) -> Tables:
    manager = KVCacheManager(plan, prefix_caching=False)
    nothing = manager.find_hit(PrefixDigests(manager.hasher, [0], None), 0)
    first = min(chunk, tokens)
    mine, other = manager.start(nothing, first), manager.start(nothing, first)
    assert mine is not None and other is not None
    for end in range(2 * chunk, tokens + chunk, chunk):
        for tables in (mine, other):
            assert manager.grow(tables, min(end, tokens)), "the arena is too small"
    return mine.groups


def _sized(nbytes: int, span_bytes: int) -> Case:
    """One layer whose block is a span; P's blocks lie in falling order, so that none are joined."""
    row_bytes = 2 * 2 * BLOCK_SIZE  # K and V, two bytes each, of one channel
    spec = FullAttentionSpec(1, span_bytes // row_bytes, "bfloat16")
    count = nbytes // span_bytes
    group = KVCacheGroup(spec, (0,))
    plan = ArenaPlan((group,), BLOCK_SIZE, BLOCK_SIZE, span_bytes, count, (1,))
    remote = tuple(reversed(range(count)))
    name = f"{_show(nbytes)}, {count} x {_show(span_bytes)}" if count > 1 else _show(nbytes)
    return Case(name, plan, (remote,), [list(range(count))], count * BLOCK_SIZE)


def _show(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
