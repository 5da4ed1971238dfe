"""How far a prefix can be resumed: the joint answer of many, and what an outside source adds."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

Longest: TypeAlias = Callable[[int], int]
"""The most tokens of a prompt, at most so many, that somebody can resume after."""


def longest_joint(limit: int, every: Sequence[Longest]) -> int:
    """The most tokens, at most `limit`, that all of `every` can resume after."""
    # Each may only shorten, so this ends; and what all accept, nobody shortens again.
    while True:
        shortest = limit
        for longest in every:
            shortest = longest(shortest)
        if shortest == limit:
            return limit
        limit = shortest


@dataclass(slots=True, frozen=True)
class Coverage:
    """The part of one prompt that a source outside this node's cache can fill in. No blocks.

    `attention`: the tokens that it can make complete in every attention group. `states`: the
    position after which it has the states of all Mamba groups; 0, which needs none, else. Both are
    asked within the step in which they were told.
    """

    attention: Longest
    states: Longest

    @classmethod
    def of(cls, num_tokens: int = 0, states_at: Collection[int] = ()) -> Self:
        """All attention of the first `num_tokens` tokens, and the states at these positions."""

        def states(limit: int) -> int:
            return max((position for position in states_at if position <= limit), default=0)

        return cls(lambda limit: min(limit, num_tokens), states)

    @classmethod
    def joined(cls, sources: Sequence["Coverage"]) -> Self:
        """At each length the source that reaches further."""
        return cls(
            lambda limit: max((it.attention(limit) for it in sources), default=0),
            lambda limit: max((it.states(limit) for it in sources), default=0),
        )


NOTHING = Coverage.of()
