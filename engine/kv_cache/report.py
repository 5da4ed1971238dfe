"""The arena plan, a model's bytes and what a tier holds, for people; and the plan for metrics."""

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import LatentAttentionSpec, MambaSpec, SlidingWindowSpec

MANY_TOKENS = 1 << 40
PROMPTS = (1024, 8192, 65536)
HAND_OVER_TOKENS = 4096
COLUMNS = ("group", "holds", "layers", "bytes each", "per unit", "waste")


def plan_report(plan: ArenaPlan, max_model_len: int) -> str:
    """The capacity without shared prefixes, and a line per KV cache group, in 80 columns."""
    longest, at_once = plan.longest_sequence(MANY_TOKENS), plan.max_concurrency(max_model_len)
    lines = [
        f"arena {plan.arena_bytes:,} bytes = {plan.num_units:,} units of {plan.unit_bytes:,}; "
        f"hash blocks of {plan.hash_block_size} tokens",
        f"room for one sequence of {longest:,} tokens, or {at_once:,} of {max_model_len:,}",
    ]
    rows = [COLUMNS, *(_row(plan, group) for group in range(len(plan.groups)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def content_report(plan: ArenaPlan, max_model_len: int) -> str:
    """Bytes of a token and of a sequence's states by group, and of a hand-over of a long prompt."""
    lines = []
    for number, group in enumerate(plan.groups):
        head, spec = (
            f"group {number}, {_kind(plan, number)}, {len(group.layers)} layers:",
            group.spec,
        )
        if isinstance(spec, MambaSpec):
            lines.append(f"{head} {plan.block_bytes(number):,} bytes a sequence; in each:")
            lines += [
                f"    {list(part.shape)!s:<20} {part.dtype:<10} {part.nbytes:>14,}"
                for part in spec.parts
            ]
        else:
            nbytes = plan.block_bytes(number) // plan.block_size_of(number)
            lines.append(f"{head} {nbytes:,} bytes a token")
    tokens = min(HAND_OVER_TOKENS, max_model_len)
    attention = sum(_attention_bytes(plan, group, tokens) for group in plan.attention_groups)
    lines += [
        f"a hand-over of {tokens:,} tokens: {attention + plan.state_bytes:,} bytes,",
        f"    {attention:,} of attention and {plan.state_bytes:,} of states",
    ]
    return "\n".join(lines)


def _attention_bytes(plan: ArenaPlan, group: int, num_tokens: int) -> int:
    """Bytes of the whole blocks that a sequence of so many tokens still needs in `group`."""
    spec, size = plan.groups[group].spec, plan.block_size_of(group)
    first = spec.first_needed(num_tokens) if isinstance(spec, SlidingWindowSpec) else 0
    return (plan.blocks_for(group, num_tokens) - first // size) * plan.block_bytes(group)


def tier_report(plan: ArenaPlan, tier_bytes: int, max_model_len: int) -> str:
    """The prompts that fit a tier of so many bytes, apart from each other, by their tokens.

    A prompt is its attention, of sliding windows the last one, and the states after it.
    """
    lines = [f"a tier of {tier_bytes:,} bytes holds"]
    for num_tokens in sorted({*(n for n in PROMPTS if n < max_model_len), max_model_len}):
        nbytes = prompt_bytes(plan, num_tokens)
        lines.append(
            f"{tier_bytes // nbytes:>9,} prompts of {num_tokens:,} tokens, {nbytes:,} bytes each"
        )
    return "\n".join(lines)


def prompt_bytes(plan: ArenaPlan, num_tokens: int) -> int:
    """Bytes of a prompt's attention and states in a tier."""
    nbytes = plan.state_bytes
    for group in plan.attention_groups:
        spec, size = plan.groups[group].spec, plan.block_size_of(group)
        first = spec.first_needed(num_tokens) if isinstance(spec, SlidingWindowSpec) else 0
        kept = num_tokens - first // size * size
        nbytes += kept * plan.block_bytes(group) // size
    return nbytes


def plan_labels(plan: ArenaPlan) -> dict[str, int]:
    """The labels of vLLM's `cache_config_info`.

    `block_size` times `num_gpu_blocks`: tokens of the longest sequence that fits alone, wherever
    the arena lies.
    """
    return {
        "block_size": plan.block_size,
        "num_gpu_blocks": plan.longest_sequence(MANY_TOKENS) // plan.block_size,
        "hash_block_size": plan.hash_block_size,
    }


def _row(plan: ArenaPlan, group: int) -> tuple[str, ...]:
    kind, size, per_unit = _kind(plan, group), plan.block_bytes(group), plan.blocks_per_unit[group]
    if group in plan.attention_groups:
        kind = f"{kind}, {plan.block_size_of(group)}-token blocks"
    return (
        str(group),
        kind,
        str(len(plan.groups[group].layers)),
        f"{size:,}",
        str(per_unit),
        f"{plan.waste(group):.2%}",
    )


def _kind(plan: ArenaPlan, group: int) -> str:
    spec = plan.groups[group].spec
    if isinstance(spec, MambaSpec):
        return f"{spec.kind} state"
    if isinstance(spec, SlidingWindowSpec):
        return f"attention, window {spec.window}"
    return "latent attention" if isinstance(spec, LatentAttentionSpec) else "attention"
