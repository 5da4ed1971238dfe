"""The arena plan for people: printed when a node starts and by `python -m engine.plan`."""

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import KVCacheGroup, MambaSpec, SlidingWindowSpec

MANY_TOKENS = 1 << 40
COLUMNS = ("group", "holds", "layers", "bytes each", "per unit", "waste")


def plan_report(plan: ArenaPlan, max_model_len: int) -> str:
    """The capacity, and one line per KV cache group; plain text in 80 columns."""
    rows = [COLUMNS, *(_row(plan, group) for group in range(len(plan.groups)))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    told = [_headline(plan), _room(plan, max_model_len), *(line.rstrip() for line in lines)]
    return "\n".join(told)


def _headline(plan: ArenaPlan) -> str:
    return (
        f"arena {plan.arena_bytes:,} bytes = {plan.num_units:,} units of {plan.unit_bytes:,}; "
        f"hash blocks of {plan.hash_block_size} tokens"
    )


def _room(plan: ArenaPlan, max_model_len: int) -> str:
    """Without shared prefixes, of which nobody knows yet."""
    longest, at_once = plan.longest_sequence(MANY_TOKENS), plan.max_concurrency(max_model_len)
    return f"room for one sequence of {longest:,} tokens, or {at_once:,} of {max_model_len:,}"


def _row(plan: ArenaPlan, group: int) -> tuple[str, ...]:
    members = plan.groups[group]
    return (
        str(group),
        _kind(plan, group, members),
        str(len(members.layers)),
        f"{plan.block_bytes(group):,}",
        str(plan.blocks_per_unit[group]),
        f"{plan.waste(group):.2%}",
    )


def _kind(plan: ArenaPlan, group: int, members: KVCacheGroup) -> str:
    spec = members.spec
    if isinstance(spec, MambaSpec):
        return f"{spec.kind} state"
    window = f"window {spec.window}, " if isinstance(spec, SlidingWindowSpec) else ""
    return f"attention, {window}{plan.block_size_of(group)}-token blocks"
