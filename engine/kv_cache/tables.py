"""Which blocks and states one request owns, per KV cache group."""

from dataclasses import dataclass


@dataclass(slots=True)
class BlockTables:
    """`groups[g]` lists an attention group's blocks in token order, or a Mamba group's state."""

    groups: tuple[list[int], ...]
