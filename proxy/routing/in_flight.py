"""Prompts under way: what nodes will soon hold, before their events say so.

Without it the equal prompts of one burst would be spread over all nodes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, takewhile
from typing import Final

from proxy.routing.block_table import BlockTable, by_name, longest
from proxy.routing.layout_index import MAMBA
from proxy.routing.prompt import HashKey, NodeHit, RoutedPrompt
from serving.rpc.messages import KVEventsInfo

LINGER_S: Final = 5.0
"""After a request's end, until its events have come for sure."""
MARK_EVERY: Final = 8
"""Hash blocks from one remembered boundary to the next: memory and time against precision."""
MAX_ENDED: Final = 4096


@dataclass(slots=True, eq=False)
class _Expectation:
    """Prefixes that a node will hold: `marks` of attention, and `end`, where it keeps states."""

    name: str
    key: HashKey
    marks: tuple[bytes, ...]
    end: tuple[bytes, ...]


class InFlight:
    """Belongs to the event loop. `linger_s`: seconds for which a request that has ended counts."""

    def __init__(
        self, linger_s: float = LINGER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._linger_s = linger_s
        self._clock = clock
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}  # by the number of the bit
        self._free: list[int] = []  # numbers of nodes that were forgotten
        self._marks: dict[HashKey, BlockTable] = {}
        self._ends = BlockTable()
        self._living: dict[str, set[_Expectation]] = {}  # by node, those that count
        self._ended: deque[tuple[float, _Expectation]] = deque()

    @contextmanager
    def expecting(
        self, prompt: RoutedPrompt, name: str, info: KVEventsInfo | None
    ) -> Iterator[None]:
        """The node `name` computes or loads the prompt until the block ends, and then keeps it.

        A block that ends with an exception leaves nothing to expect. Nodes without events keep
        nothing that could be counted on.
        """
        if info is None:
            yield
            return
        expectation = self._begin(prompt, name, info)
        try:
            yield
        except BaseException:
            self._end(expectation)
            raise
        self._ended.append((self._clock() + self._linger_s, expectation))
        if len(self._ended) > MAX_ENDED:
            self._end(self._ended.popleft()[1])

    def forget(self, name: str) -> None:
        """A node has lost what it held, or is gone."""
        if name not in self._bits:
            return
        for expectation in list(self._living.pop(name)):
            self._take_out(expectation)
        number = self._bits.pop(name).bit_length() - 1
        del self._names[number]
        self._free.append(number)

    def hits(self, prompt: RoutedPrompt) -> dict[str, NodeHit]:
        """By node what it holds of the prompt, by `prompt.hits`, or soon will.

        States stand where a prompt under way has its last hash block before its last token: they
        count only if all of it is the beginning of this prompt.
        """
        now = self._clock()
        while self._ended and self._ended[0][0] <= now:
            self._end(self._ended.popleft()[1])
        hits = dict(prompt.hits)
        for key, marks in self._marks.items():
            if not marks.nodes:
                continue
            digests = prompt.boundaries(key)[1 : (prompt.num_tokens - 1) // key.hash_block_size + 1]
            # Whatever reaches a boundary has a mark at each regular one before it, so what follows
            # the first one without a mark is left out: mostly nearly all.
            regular = takewhile(marks.nodes.__contains__, digests[MARK_EVERY - 1 :: MARK_EVERY])
            digests = digests[: (len(list(regular)) + 1) * MARK_EVERY]
            ends = self._find(self._ends, digests, key)
            for name, attention in self._find(marks, digests, key).items():
                known, resumable = hits.get(name), ends.get(name, 0)
                if known is None:
                    hits[name] = NodeHit(attention, resumable)
                elif attention > known.attention or resumable > known.resumable:
                    hits[name] = known.or_better(NodeHit(attention, resumable))
        return hits

    def _begin(self, prompt: RoutedPrompt, name: str, info: KVEventsInfo) -> _Expectation:
        key = HashKey.of(info)
        boundaries = prompt.boundaries(key)[: (prompt.num_tokens - 1) // info.hash_block_size + 1]
        last = tuple(boundaries[1:][-1:])
        marks = tuple({*boundaries[MARK_EVERY::MARK_EVERY], *last})
        has_states = any(group.kind == MAMBA for group in info.groups)
        expectation = _Expectation(name, key, marks, last if has_states else marks)
        if name not in self._bits:
            number = self._free.pop() if self._free else len(self._names)
            self._bits[name] = 1 << number
            self._names[number] = name
        bit = self._bits[name]
        self._marks.setdefault(key, BlockTable()).store(bit, marks)
        self._ends.store(bit, expectation.end)
        self._living.setdefault(name, set()).add(expectation)
        return expectation

    def _end(self, expectation: _Expectation) -> None:
        # A node that was forgotten meanwhile has none of its former expectations.
        living = self._living.get(expectation.name, set())
        if expectation in living:
            living.remove(expectation)
            self._take_out(expectation)

    def _take_out(self, expectation: _Expectation) -> None:
        bit = self._bits[expectation.name]
        self._marks[expectation.key].remove(bit, expectation.marks)
        self._ends.remove(bit, expectation.end)

    def _find(self, table: BlockTable, digests: Sequence[bytes], key: HashKey) -> dict[str, int]:
        size, every = key.hash_block_size, sum(self._bits.values())
        known = compress(range(len(digests)), map(table.nodes.__contains__, digests))
        places = reversed(list(known))
        lengths = longest((((k + 1) * size, table.nodes[digests[k]]) for k in places), every)
        return by_name(lengths, self._names)
