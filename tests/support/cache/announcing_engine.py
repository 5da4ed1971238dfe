"""An engine of another project that announces its blocks, and a brute-force reader of events.

Its hashes are opaque: a reader that has only events cannot compute them. The engine has one group
of full attention and two of Mamba, which keep few of many blocks, also inside a block.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from random import Random
from typing import Any

import msgspec

from engine.types import GenerateRequest
from proxy.routing.prompt import NodeHit, RoutedPrompt
from serving.rpc.messages import KVEventsInfo, KVGroupInfo
from tests.support.cache.published_events import TODAY, PublishedForm

SIZE, TAIL = 4, 2
FULL, STATES = 0, (1, 2)
KINDS = {0: "full_attention", 1: "mamba", 2: "mamba"}
HYBRID = KVEventsInfo(
    endpoint="none",
    hash_block_size=SIZE,
    groups=(KVGroupInfo("full_attention"), KVGroupInfo("mamba")),
    publisher="vllm",
)
Text = tuple[str | None, tuple[int, ...]]  # a salt and tokens
Announced = dict[str, Any]  # a type, and fields by name


def hash_of(text: Text) -> int:
    """Nobody else's: with a seed of its own."""
    return int.from_bytes(sha256(b"seed" + repr(text).encode()).digest()[:8], "big")


def prefix(text: Text, end: int) -> Text:
    return text[0], text[1][:end]


def stored(
    text: Text,
    ends: Sequence[int],
    *,
    start: int,
    group: int,
    size: int = SIZE,
    medium: str = "GPU",
) -> Announced:
    """Blocks that end at `ends`; the tokens are those from `start` to the last of them."""
    tokens = text[1][start : ends[-1]]
    keys = [[text[0]] if end - size == 0 and text[0] else None for end in ends]
    return dict(
        type="BlockStored",
        block_hashes=[hash_of(prefix(text, end)) for end in ends],
        parent_block_hash=hash_of(prefix(text, start)) if start else None,
        token_ids=list(tokens),
        block_size=size,
        lora_id=None,
        lora_name=None,
        medium=medium,
        extra_keys=keys,
        group_idx=group,
        kv_cache_spec_kind=KINDS[group],
    )


def removed(text: Text, end: int, group: int, medium: str = "GPU") -> Announced:
    hashes = [hash_of(prefix(text, end))]
    return dict(type="BlockRemoved", block_hashes=hashes, medium=medium, group_idx=group)


def payload(
    events: Iterable[Announced], ts: float = 1.0, form: PublishedForm = TODAY, **changed: Any
) -> bytes:
    """A batch in a published form, with those of the fields that it has."""
    kinds = {"BlockStored": form.stored, "BlockRemoved": form.removed}
    sent = []
    for event in events:
        kind = kinds.get(event["type"], form.cleared)
        values = event | changed
        sent.append(kind(**{f: values[f] for f in kind.__struct_fields__ if f in values}))
    batch = form.batch(ts, sent)
    return msgspec.msgpack.encode(batch)


class Engine:
    """Holds blocks as vLLM does: a block of attention never without those before it."""

    def __init__(self) -> None:
        self._held: dict[int, list[Text]] = {group: [] for group in KINDS}

    def run(self, text: Text, *, again: bool, checkpoint: int) -> list[Announced]:
        """Compute a prompt; `checkpoint`: 0 for none, 1 at the last boundary, 2 as well inside."""
        end = len(text[1]) // SIZE * SIZE
        if not end:
            return []
        has = max(
            e for e in range(0, end + 1, SIZE) if not e or prefix(text, e) in self._held[FULL]
        )
        start = 0 if again else has
        events = []
        if start < end:
            ends = range(start + SIZE, end + 1, SIZE)
            events.append(stored(text, ends, start=start, group=FULL))
            self._held[FULL] += [prefix(text, each) for each in ends if each > has]
        for group in STATES if checkpoint else ():
            events += self._keep(text, end, group, start=start if start < end else end - SIZE)
            if checkpoint > 1 and len(text[1]) >= end + TAIL:
                events += self._keep(text, end + TAIL, group, start=end)
        return events

    def evict(self, number: int) -> list[Announced]:
        """A checkpoint, or a block that none follows."""
        leaves = [
            (group, text)
            for group, texts in self._held.items()
            for text in texts
            if group != FULL or not any(prefix(t, len(text[1])) == text != t for t in texts)
        ]
        if not leaves:
            return []
        group, text = leaves[number % len(leaves)]
        self._held[group].remove(text)
        return [removed(text, len(text[1]), group)]

    def clear(self) -> list[Announced]:
        self.__init__()  # type: ignore[misc]
        return [dict(type="AllBlocksCleared")]

    def _keep(self, text: Text, end: int, group: int, *, start: int) -> list[Announced]:
        if (kept := prefix(text, end)) in self._held[group]:
            return []
        self._held[group].append(kept)
        size = SIZE if end % SIZE == 0 else TAIL
        return [stored(text, [end], start=start, group=group, size=size)]


class Reader:
    """Replays events by definition: counted hashes, each of which it knows the text of.

    `counts_copies`: False for one that believes nothing is left of a block after one removal.
    """

    def __init__(self, *, counts_copies: bool) -> None:
        self._counts_copies = counts_copies
        self._held: dict[int, Counter[int]] = {group: Counter() for group in KINDS}

    def read(self, events: Iterable[Announced]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._held = {group: Counter() for group in KINDS}
                continue
            held = self._held[event["group_idx"]]
            for each in event["block_hashes"]:
                if event["type"] == "BlockStored":
                    held[each] = held[each] + 1 if self._counts_copies else 1
                else:
                    held[each] = max(0, held[each] - 1)

    def hit(self, text: Text) -> NodeHit:
        attention = resumable = 0
        for end in range(1, len(text[1])):
            whole = -(-end // SIZE) * SIZE
            if whole > len(text[1]) or not self._has(text, range(SIZE, whole + 1, SIZE), FULL):
                continue
            attention = end if end == whole else attention
            if all(self._has(text, [end], group) for group in STATES):
                resumable = end
        return NodeHit(attention, resumable)

    def _has(self, text: Text, ends: Iterable[int], group: int) -> bool:
        return all(self._held[group][hash_of(prefix(text, end))] for end in ends)


def prompt_of(text: Text) -> RoutedPrompt:
    request = GenerateRequest(request_id="r", prompt_token_ids=text[1], cache_salt=text[0])
    return RoutedPrompt(request)


def some_text(rng: Random) -> Text:
    tokens = tuple(rng.choices((1, 2), weights=(5, 1), k=rng.randrange(1, 22)))
    return rng.choice((None, None, "s")), tokens


def life(rng: Random, num_steps: int) -> list[list[Announced]]:
    """Batches of one engine; the events of a step stand in the order of their groups."""
    engine, steps = Engine(), []
    for _ in range(num_steps):
        events: list[Announced] = []
        for _ in range(rng.randrange(1, 3)):
            if (dice := rng.random()) < 0.6:
                again, checkpoint = rng.random() < 0.2, rng.randrange(3)
                events += engine.run(some_text(rng), again=again, checkpoint=checkpoint)
            elif dice < 0.98:
                events += engine.evict(rng.randrange(1000))
            else:
                events += engine.clear()
        steps.append(events)
    return steps
