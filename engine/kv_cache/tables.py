"""Which blocks and states one request uses, per KV cache group."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.kv_cache.attention_group import NULL_BLOCK, GroupTable
from engine.kv_cache.run import Run


class BlockCopy(NamedTuple):
    """The worker copies a block or state before it computes anything else."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class BlockTables:
    """What the worker and the connector read, and what the manager books.

    `groups[g]` lists an attention group's blocks in token order, or a Mamba group's state.
    `attention[g]`: the books of an attention group. `state`: the states of all Mamba groups.
    `num_checkpointed`: tokens up to the last checkpoint that the request started from or made.
    """

    groups: tuple[list[int], ...]
    attention: dict[int, GroupTable]
    state: Run | None
    num_checkpointed: int = 0

    def used(self, group: int) -> list[int]:
        """The group's blocks without those that a window has left behind."""
        return [block for block in self.groups[group] if block != NULL_BLOCK]
