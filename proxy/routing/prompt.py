"""One request as routing sees it: its prompt as digests, and what each node holds of it."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.types import GenerateRequest
from proxy.routing.chained_digests import ChainedDigests
from serving.rpc.messages import KVEventsInfo


class HashKey(NamedTuple):
    """The inputs of block digests besides tokens and salt: equal on nodes with equal digests.

    `is_chained`: the digests are ours alone (`ChainedDigests`), for engines of other projects.
    """

    hash_block_size: int
    hash_seed: str
    is_chained: bool = False

    @classmethod
    def of(cls, info: KVEventsInfo) -> "HashKey":
        """The key of a node's events."""
        return cls(info.hash_block_size, info.hash_seed, info.publisher != "tandem")


class NodeHit(msgspec.Struct, frozen=True, gc=False):
    """Tokens at the start of a prompt that one node holds.

    `attention`: in all its attention groups, in whole hash blocks; what D need not pull.
    `resumable`: with states as well; where P, or D alone, goes on. Both leave at least the prompt's
    last token. The discounts are tokens to subtract because slower tiers hold some.
    """

    attention: int = 0
    resumable: int = 0
    attention_discount: float = 0.0
    resumable_discount: float = 0.0

    def or_better(self, other: "NodeHit") -> "NodeHit":
        """The longer of both, for attention and for states."""
        attention = self if self.attention >= other.attention else other
        resumable = self if self.resumable >= other.resumable else other
        return NodeHit(
            attention.attention,
            resumable.resumable,
            attention.attention_discount,
            resumable.resumable_discount,
        )


NO_HIT = NodeHit()


class RoutedPrompt:
    """The prompt of one request, with its output so far.

    `hits`: by node name, what is known of it; absent: nothing.
    Digests are computed when they are first asked for, once for each key.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.num_tokens = len(request.token_ids)
        self.hits: Mapping[str, NodeHit] = {}
        self._digests: dict[HashKey, PrefixDigests | ChainedDigests] = {}

    def boundaries(self, key: HashKey) -> list[bytes]:
        """Digests of the prefixes of 0, 1, 2, ... whole hash blocks; read-only."""
        return self._prefix(key).boundaries()

    def digest(self, key: HashKey, num_tokens: int) -> bytes:
        """The digest of the first `num_tokens` tokens."""
        return self._prefix(key).digest_at(num_tokens)

    def hit(self, name: str) -> NodeHit:
        """The part that the node `name` holds."""
        return self.hits.get(name, NO_HIT)

    def drop_digests(self) -> None:
        """Nobody will choose for it again: an answer may take long, and digests are large."""
        self._digests.clear()

    def _prefix(self, key: HashKey) -> PrefixDigests | ChainedDigests:
        if key not in self._digests:
            tokens, salt = list(self.request.token_ids), self.request.cache_salt
            if key.is_chained:
                self._digests[key] = ChainedDigests(key.hash_block_size, tokens, salt)
            else:
                hasher = PrefixHasher(key.hash_block_size, key.hash_seed)
                self._digests[key] = PrefixDigests(hasher, tokens, salt)
        return self._digests[key]
