"""Which blocks and states one request owns, per KV cache group."""

from dataclasses import dataclass


@dataclass(slots=True)
class BlockTables:
    """`groups[g]` lists block ids of an attention group in token order, or the one state of a Mamba group."""

    groups: tuple[list[int], ...]
