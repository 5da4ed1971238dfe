"""Bad words: the tokens that would complete one, at a cost that does not grow with their number.

The automaton is that of Aho and Corasick, over all words without their last tokens.
"""

from collections.abc import Sequence
from functools import lru_cache

from engine.types import BadWord, TokenId


class _Automaton:
    """Node 0 is the empty beginning of a word, each other one a beginning of at least one word.

    `_longer`: by node and token, the node that is this token longer. `_shorter[n]`: the longest
    node that node n ends with. `_ends[n]`: last tokens of the words that are node n but for these.
    `_shorter_end[n]`: the first node with last tokens on the way of `_shorter` from n on, or 0.
    """

    def __init__(self, words: Sequence[BadWord]) -> None:
        self._longer: dict[tuple[int, TokenId], int] = {}
        self._ends: dict[int, set[TokenId]] = {0: set()}
        begun = [(0, word.token_ids) for word in words]
        self._shorter = [0]
        # One token of all words after the other: the nodes that are shorter have been made.
        for place in range(max(map(len, (ids for _, ids in begun)), default=0)):
            begun = [self._go_on(node, ids, place) for node, ids in begun if place < len(ids)]
        self._shorter_end = [0]
        for shorter in self._shorter[1:]:
            has_ends = shorter in self._ends
            self._shorter_end.append(shorter if has_ends else self._shorter_end[shorter])

    def _go_on(
        self, node: int, token_ids: tuple[TokenId, ...], place: int
    ) -> tuple[int, tuple[TokenId, ...]]:
        """The node of the first `place` + 1 tokens, unless the last one of the word is reached."""
        token = token_ids[place]
        if place == len(token_ids) - 1:
            self._ends.setdefault(node, set()).add(token)
            return node, token_ids
        longer = self._longer.get((node, token))
        if longer is None:
            shorter = self.after(self._shorter[node], token) if node else 0
            longer = self._longer[node, token] = len(self._shorter)
            self._shorter.append(shorter)
        return longer, token_ids

    def after(self, node: int, token: TokenId) -> int:
        """The longest node that `node` and then `token` end with."""
        while (longer := self._longer.get((node, token))) is None:
            if not node:
                return 0
            node = self._shorter[node]
        return longer

    def last_tokens(self, node: int) -> frozenset[TokenId]:
        """Tokens that complete a word after `node`."""
        found = set(self._ends.get(node, ()))
        while node:
            node = self._shorter_end[node]
            found |= self._ends[node]
        return frozenset(found)


# Shared by the choices of a request, which arrive one by one.
_automaton_of = lru_cache(maxsize=32)(_Automaton)


class BadWordMatcher:
    """Follows one output."""

    __slots__ = ("_automaton", "_node", "_num_seen")

    def __init__(self, words: tuple[BadWord, ...], num_prompt_tokens: int) -> None:
        self._automaton = _automaton_of(words)
        self._num_seen = num_prompt_tokens  # as in vLLM a word counts only where all is output
        self._node = 0

    def forbidden(self, token_ids: Sequence[TokenId]) -> frozenset[TokenId]:
        """Tokens that would complete a word; `token_ids` have grown since the last call."""
        for index in range(self._num_seen, len(token_ids)):
            self._node = self._automaton.after(self._node, token_ids[index])
        self._num_seen = len(token_ids)
        return self._automaton.last_tokens(self._node)
