"""Prefixes of prompts on the nodes whose KV cache groups are alike: one table per group and tier.

All nodes are asked at once: a column has, for each hash block of the prompt, the set of nodes that
hold it, and columns are combined as a whole. Knows no names of nodes and no locks.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, compress, repeat, takewhile
from operator import and_, ne, or_
from typing import Final, NamedTuple

from proxy.routing.block_table import BlockTable, CheckpointTable, longest
from proxy.routing.prompt import HashKey, RoutedPrompt
from serving.kv_events.wire import CPU, GPU, STORAGE
from serving.rpc.messages import KVEventsInfo, KVGroupInfo

TIERS: Final = {GPU: 1.0, CPU: 0.8, STORAGE: 0.5}
"""Worth of a token in each tier, beside one in the first; loads from slower ones take time."""
SLIDING_WINDOW, MAMBA = "sliding_window", "mamba"
EVERY_NODE: Final = -1
START: Final = b""
"""Stands for the parent of what has none."""

Column = Iterable[int]
Lengths = list[tuple[int, int]]
"""(tokens, nodes that have so many): the longest first, no node twice."""


class Layout(NamedTuple):
    """The cache geometry of a node: nodes with an equal one are looked up together."""

    key: HashKey
    groups: tuple[KVGroupInfo, ...]
    model_identity: str

    @classmethod
    def of(cls, info: KVEventsInfo) -> "Layout":
        """The layout of a node that publishes events."""
        return cls(HashKey.of(info), info.groups, info.model_identity)


class LayoutIndex:
    """Owner of the tables of one layout. `nodes`: those that are asked for, one bit each."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.key, groups = layout.key, layout.groups
        self.nodes = 0
        self._size = layout.key.hash_block_size
        self._tables: dict[tuple[int, str], BlockTable] = {}
        self._states = [g for g, it in enumerate(groups) if it.kind == MAMBA]
        # A window of unknown length reads everything, to be safe.
        self._windows = {
            g: it.sliding_window
            for g, it in enumerate(groups)
            if it.kind == SLIDING_WINDOW and it.sliding_window
        }
        self._full = [g for g in range(len(groups)) if g not in {*self._states, *self._windows}]
        self.num_groups = len(groups)

    @property
    def tiers(self) -> tuple[str, ...]:
        """The fastest tier, and those others that were ever used."""
        used = {GPU, *(tier for _, tier in self._tables)}
        return tuple(tier for tier in TIERS if tier in used)

    @property
    def tables(self) -> list[BlockTable]:
        """All tables, for sweeping and counting."""
        return list(self._tables.values())

    def table(self, group: int, tier: str) -> BlockTable:
        """The table of a group in a tier, made when it is first needed."""
        table = self._tables.get((group, tier))
        if table is None:
            table = CheckpointTable() if group in self._states else BlockTable()
            self._tables[group, tier] = table
        return table

    def find(self, prompt: RoutedPrompt, tiers: Sequence[str]) -> tuple[Lengths, Lengths]:
        """The longest prefix by node: in attention, and where states stand as well.

        Of attention in whole hash blocks; both leave the prompt's last token.
        """
        digests = prompt.boundaries(self.key)
        attention = self._attention(digests, tiers)
        last = (prompt.num_tokens - 1) // self._size
        ends = attention.ends[last::-1] if last < len(attention.ends) else attention.ends[::-1]
        # Only where the set of nodes changes is anybody's longest prefix: mostly in few places.
        changes = map(ne, ends, (0, *ends))
        lengths = range(self._size * (len(ends) - 1), 0, -self._size)
        whole = longest(compress(zip(lengths, ends, strict=False), changes), self.nodes)
        if not self._states:
            return whole, whole
        standing = self._checkpoints(prompt, tiers, attention)
        return whole, longest(standing, self.nodes)

    def _attention(self, digests: Sequence[bytes], tiers: Sequence[str]) -> "_Attention":
        blocks = digests[1:]
        columns = [self._column(group, blocks, tiers) for group in self._full]
        joint = reduce(_both, columns) if columns else repeat(EVERY_NODE, len(blocks))
        # reach[k]: the nodes with the first k blocks. It only shrinks, and ends before the first
        # block that no node has.
        reach = list(takewhile(bool, accumulate(joint, and_, initial=self.nodes)))
        blocks, ends = blocks[: len(reach) - 1], reach
        windows = []
        for group, window in self._windows.items():
            column = list(self._column(group, blocks, tiers))
            windows.append(_Window(column, window, self._size))
            ends = list(map(and_, ends, windows[-1].ends))
        return _Attention(self._size, reach, ends, windows)

    def _checkpoints(
        self, prompt: RoutedPrompt, tiers: Sequence[str], attention: "_Attention"
    ) -> Iterator[tuple[int, int]]:
        """(tokens, nodes that can resume there), longest first."""
        size, last = self._size, (prompt.num_tokens - 1) // self._size
        digests = prompt.boundaries(self.key)[: len(attention.ends)]
        # Nothing ends at 0 tokens; what ends in the first block has no parent.
        digests[:1] = [START]
        standing = list(self._standing(digests[: last + 1], tiers))
        inside = self._inside(digests, tiers)
        places = compress(range(len(standing)), standing)
        for place in sorted({*places, *inside}, reverse=True):
            #   place * size            place * size + length        (place + 1) * size
            #   a checkpoint at the     one inside the block, with   up to here attention must
            #   boundary                the rest of its tokens       be known for it
            for length in inside.get(place, ()):
                num_tokens = place * size + length
                if num_tokens < prompt.num_tokens and (ok := attention.at(num_tokens)):
                    digest = prompt.digest(self.key, num_tokens)
                    yield num_tokens, reduce(and_, self._standing([digest], tiers), ok)
            if place < len(standing):
                yield place * size, standing[place] & attention.ends[place]

    def _standing(self, digests: Sequence[bytes], tiers: Sequence[str]) -> Column:
        """For each digest the nodes with a checkpoint there, in all Mamba groups."""
        return reduce(_both, (self._column(group, digests, tiers) for group in self._states))

    def _inside(self, digests: Sequence[bytes], tiers: Sequence[str]) -> dict[int, list[int]]:
        """By place of a boundary, how many tokens after it checkpoints stand, longest first."""
        found: dict[int, list[int]] = {}
        for tier in tiers:
            table = self._tables.get((self._states[0], tier))
            if isinstance(table, CheckpointTable) and table.tails:
                tails = table.tails
                for place in compress(range(len(digests)), map(tails.__contains__, digests)):
                    lengths = {*found.get(place, ()), *tails[digests[place]]}
                    found[place] = sorted(lengths, reverse=True)
        return found

    def _column(self, group: int, digests: Sequence[bytes], tiers: Sequence[str]) -> Column:
        """For each digest the nodes that hold it in one of `tiers`."""
        tables = [self._tables[group, tier] for tier in tiers if (group, tier) in self._tables]
        columns: list[Column] = [map(it.nodes.get, digests, repeat(0)) for it in tables]
        if not columns:
            return repeat(0, len(digests))
        return reduce(lambda one, other: map(or_, one, other), columns)


class _Window:
    """One sliding-window group: `ends[k]` are the nodes that can resume after k blocks."""

    def __init__(self, column: list[int], window: int, size: int) -> None:
        self.column, self._window = column, window
        # A token reads itself and the window - 1 tokens before it.
        self._reach = -(-(window - 1) // size)
        self._size = size
        self.ends = _joint(column, self._reach)

    def at(self, num_tokens: int) -> int:
        """The nodes with all blocks that the token after `num_tokens` tokens reads."""
        end = -(-num_tokens // self._size)
        first = max(0, num_tokens - self._window + 1) // self._size
        # From inside a block the window may begin one block earlier than from the block's end.
        before = EVERY_NODE if first >= end - self._reach else self.column[first]
        return self.ends[end] & before


class _Attention(NamedTuple):
    """All attention groups: `ends[k]` are the nodes that can resume after k whole blocks.

    `reach[k]`: those with the first k blocks in all groups of full attention.
    """

    size: int
    reach: list[int]
    ends: list[int]
    windows: list[_Window]

    def at(self, num_tokens: int) -> int:
        """The nodes that can resume inside a block, which they must hold as a whole."""
        end = -(-num_tokens // self.size)
        if end >= len(self.reach):
            return 0
        return reduce(and_, (window.at(num_tokens) for window in self.windows), self.reach[end])


def _joint(column: list[int], width: int) -> list[int]:
    """For k = 0, 1, 2, ...: the nodes that hold each of the `width` blocks before block k.

    Of three passes over chunks of `width` blocks (van Herk's running minimum), whatever the width:

        chunk         [ 0 1 2 3 ] [ 4 5 6 7 ]
        blocks 2..5         ---     ---          the end of one chunk and the start of the next
    """
    if not width:
        return [EVERY_NODE] * (len(column) + 1)
    starts: list[int] = []
    ends: list[int] = []
    for first in range(0, len(column), width):
        chunk = column[first : first + width]
        starts += accumulate(chunk, and_)
        ends += [*accumulate(reversed(chunk), and_)][::-1]
    return [EVERY_NODE, *starts[:width], *map(and_, ends[1:], starts[width:])]


def _both(one: Column, other: Column) -> Column:
    return map(and_, one, other)
