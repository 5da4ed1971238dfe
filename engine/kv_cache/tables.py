"""Which blocks and states one request uses, per KV cache group."""

from dataclasses import dataclass, field

NULL_BLOCK = -1  # a block that lies wholly behind its group's window


@dataclass(slots=True)
class BlockTables:
    """`groups[g]` lists an attention group's blocks in token order, or a Mamba group's state.

    `num_published[g]`, `num_passed[g]`: leading blocks that are findable, or left behind a window.
    `num_checkpointed`: tokens up to the last checkpoint that the request started from or made.
    """

    groups: tuple[list[int], ...]
    num_published: list[int]
    num_passed: list[int] = field(init=False)
    num_checkpointed: int = 0

    def __post_init__(self) -> None:
        self.num_passed = [0] * len(self.groups)

    def used(self, group: int) -> list[int]:
        """The group's blocks without those that a window has left behind."""
        return [block for block in self.groups[group] if block != NULL_BLOCK]
