"""The tokens and states that a source outside this node's cache can fill in. No blocks."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Coverage:
    """The part of one prompt that an external source offers, in tokens.

    `attention_tokens`: it can fill every attention group for the tokens [0, attention_tokens).
    `states_at`: the token counts after which it has the states of all Mamba groups; any order.
    """

    attention_tokens: int = 0
    states_at: tuple[int, ...] = ()

    def attention_up_to(self, limit: int) -> int:
        """The longest prefix of at most `limit` tokens whose attention it can fill."""
        return min(limit, self.attention_tokens)

    def state_up_to(self, limit: int) -> int:
        """The last position of at most `limit` tokens with a state; 0, which needs none, else."""
        return max((position for position in self.states_at if position <= limit), default=0)


NOTHING = Coverage()
