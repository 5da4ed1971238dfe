"""The positions at which a prefill keeps its Mamba states for reuse: a pure policy.

`last + branch point + one shortly before the end + one per interval`. Prompts mostly differ near
their ends: other questions about one document, other tails after one context. A state there gives
more hits, with fewer writes, than one per 8,192 tokens alone (benchmarks/README.md).
"""

from collections.abc import Sequence

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec

DEFAULT_TAIL = 2048
DEFAULT_INTERVAL = 16_384


def checkpoint_positions(
    num_hit_tokens: int,
    branch_point: int,
    num_prompt_tokens: int,
    *,
    block_size: int,
    interval: int = DEFAULT_INTERVAL,
    tail: int = DEFAULT_TAIL,
) -> tuple[int, ...]:
    """Token counts after the hit, ascending, at which the state is worth keeping.

    The prompt's last boundary before its last token; the `branch_point`, where this prompt leaves a
    longer cached one that had no checkpoint there; `tail` tokens before the last; and every
    multiple of `interval`. All but the branch point are rounded down to boundaries, multiples of
    `block_size`, at which blocks of all attention groups end.
    """
    last = (num_prompt_tokens - 1) // block_size * block_size
    spread = (last, last - tail, *range(interval, last, interval))
    wanted = {branch_point, *(p // block_size * block_size for p in spread)}
    return tuple(sorted(p for p in wanted if num_hit_tokens < p <= last))


def decode_positions(
    num_prompt_tokens: int, start: int, end: int, *, interval: int
) -> tuple[int, ...]:
    """Token counts after the prompt, ascending, that tokens `start` to `end` reach.

    Every multiple of `interval`; 0 keeps no state while a request decodes.
    """
    if not interval:
        return ()
    first = max(num_prompt_tokens, start) // interval + 1
    return tuple(range(first * interval, end + 1, interval))


def due(positions: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    """The positions that a chunk from `start` to `end` reaches."""
    return tuple(p for p in positions if start < p <= end)


def value_per_token(plan: ArenaPlan) -> float:
    """The saving per byte of a checkpoint, for each token since the one before it.

    Relative to an attention block, whose value is 1.
    """
    sizes = {True: 0.0, False: 0.0}
    for group, members in enumerate(plan.groups):
        is_state = isinstance(members.spec, MambaSpec)
        per = 1 if is_state else plan.block_size_of(group)
        sizes[is_state] += plan.block_bytes(group) / per
    return (sizes[False] or 1.0) / (sizes[True] or 1.0)
