"""The index against a brute-force model: counted prefixes by node, group and tier."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import astuple

from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.types import GenerateRequest
from proxy.routing import prefix_index
from proxy.routing.block_table import CheckpointTable
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import NodeHit, RoutedPrompt
from serving.kv_events.wire import CPU, GPU, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored
from serving.rpc.messages import KVEventsInfo, KVGroupInfo

SIZE = 4
FULL = KVGroupInfo(kind="full_attention")
STATE = KVGroupInfo(kind="mamba")
GROUPS = {
    "full": FULL,
    "state": STATE,
    "window": KVGroupInfo(kind="sliding_window", sliding_window=8),
    "wide": KVGroupInfo(kind="sliding_window", sliding_window=13),
    "one": KVGroupInfo(kind="sliding_window", sliding_window=1),
}
MIXES = [
    ("full",),
    ("state", "full"),
    ("full", "full", "state", "state"),
    ("window",),
    ("state", "window"),
    ("full", "window", "state"),
    ("state", "wide", "full", "one"),
    ("state",),
]
TIERS = {GPU: 1.0, CPU: 0.8, STORAGE: 0.5}
NODES = ("a", "b", "c")
Text = tuple[str | None, tuple[int, ...]]  # a salt and tokens


class Step(NamedTuple):
    """One change of what one node holds: [`first`, `end`) of a text, or its states at `end`."""

    verb: str
    node: str
    group: int
    tier: str
    text: Text
    first: int
    end: int


def info_of(mix: Sequence[str], seed: str = "") -> KVEventsInfo:
    groups = tuple(GROUPS[name] for name in mix)
    return KVEventsInfo(endpoint="none", hash_block_size=SIZE, hash_seed=seed, groups=groups)


def prompt_of(text: Text) -> RoutedPrompt:
    request = GenerateRequest(request_id="r", prompt_token_ids=text[1], cache_salt=text[0])
    return RoutedPrompt(request)


def digests_of(text: Text, seed: str = "") -> PrefixDigests:
    return PrefixDigests(PrefixHasher(SIZE, seed), list(text[1]), text[0])


class Model:
    """Counts the texts that each node holds; the index must find the same."""

    def __init__(self, mix: Sequence[str]) -> None:
        self.groups = [GROUPS[name] for name in mix]
        self.held: dict[tuple[str, int, str], Counter[Text]] = {}

    def of(self, node: str, group: int, tier: str) -> Counter[Text]:
        return self.held.setdefault((node, group, tier), Counter())

    def clear(self, node: str) -> None:
        self.held = {key: held for key, held in self.held.items() if key[0] != node}

    def hit(self, node: str, text: Text) -> NodeHit:
        by_tier = []
        for number in range(1, len(TIERS) + 1):
            by_tier.append(self.lengths(node, text, list(TIERS)[:number]))
        discounts = [0.0, 0.0]
        for place in (0, 1):
            known = 0
            for lengths, weight in zip(by_tier, TIERS.values(), strict=True):
                discounts[place] += (1 - weight) * (lengths[place] - known)
                known = lengths[place]
        return NodeHit(*by_tier[-1], *discounts)

    def lengths(self, node: str, text: Text, tiers: Iterable[str]) -> tuple[int, int]:
        salt, tokens = text
        held = [
            {it for tier in tiers for it, copies in self.of(node, group, tier).items() if copies}
            for group in range(len(self.groups))
        ]
        attention = resumable = 0
        for length in range(1, len(tokens)):
            if not self.has_attention(held, text, length):
                continue
            attention = length if length % SIZE == 0 else attention
            at = salt, tokens[:length]
            stands = all(at in held[g] for g, it in enumerate(self.groups) if it is STATE)
            if stands and (STATE in self.groups or length % SIZE == 0):
                resumable = length
        return attention, resumable

    def has_attention(self, held: list[set[Text]], text: Text, length: int) -> bool:
        salt, tokens = text
        if -(-length // SIZE) * SIZE > len(tokens):
            return False  # inside the last block, which the prompt does not fill
        for group, info in enumerate(self.groups):
            if info is STATE:
                continue
            window = info.sliding_window
            first = 0 if window is None else max(0, length - window + 1) // SIZE
            ends = [SIZE * (block + 1) for block in range(first, -(-length // SIZE))]
            if any((salt, tokens[:end]) not in held[group] for end in ends):
                return False
        return True


def event_of(step: Step, info: KVGroupInfo) -> BlockStored | BlockRemoved:
    """The event of one step, as a node announces it."""
    prefix, tokens = digests_of(step.text), step.text[1]
    if info is STATE:
        tail = step.end % SIZE or SIZE
        key = prefix.key(step.end)
        hashes: tuple[bytes, ...] = (key.digest,)
        parent = prefix.key(step.end - tail).boundary if step.end > tail else None
        covered = tokens[step.end - tail : step.end]
    else:
        tail = SIZE
        hashes = tuple(prefix.boundaries()[step.first + 1 : step.end + 1])
        parent = prefix.boundaries()[step.first] if step.first else None
        covered = tokens[step.first * SIZE : step.end * SIZE]
    if step.verb == "remove":
        return BlockRemoved(hashes, step.tier, step.group)
    return BlockStored(hashes, parent, covered, tail, medium=step.tier, group_idx=step.group)


def texts_of(step: Step, info: KVGroupInfo) -> list[Text]:
    salt, tokens = step.text
    if info is STATE:
        return [(salt, tokens[: step.end])]
    return [(salt, tokens[: SIZE * (block + 1)]) for block in range(step.first, step.end)]


TEXTS = st.tuples(
    st.sampled_from([None, None, "s"]),
    st.lists(st.integers(0, 1), min_size=1, max_size=8).flatmap(
        # Few different tokens per block, so that texts share prefixes.
        lambda bits: st.integers(1, SIZE).map(
            lambda rest: tuple(t for bit in bits for t in (bit, 7, 7, 7))[
                : 4 * len(bits) - 4 + rest
            ]
        )
    ),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[tuple[str, ...], list[Step], list[Text]]:
    mix = draw(st.sampled_from(MIXES))
    texts = draw(st.lists(TEXTS, min_size=1, max_size=4))
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 30))):
        old = draw(st.integers(0, 3)) == 0 and steps
        if old:
            # What is stored is removed, stored again, or removed once too often.
            step = draw(st.sampled_from(steps))
            steps.append(step._replace(verb=draw(st.sampled_from(["remove", "remove", "store"]))))
            continue
        text, group = draw(st.sampled_from(texts)), draw(st.integers(0, len(mix) - 1))
        num_blocks, first = len(text[1]) // SIZE, 0
        if mix[group] == "state":
            end = draw(st.integers(1, len(text[1])))
        else:
            end = num_blocks - draw(st.integers(0, num_blocks)) // 3
            first = draw(st.integers(0, end)) if mix[group] != "full" else 0
        verb = draw(st.sampled_from(["store"] * 12 + ["clear", "leave"]))
        tier = draw(st.sampled_from([GPU, GPU, GPU, CPU, STORAGE]))
        node = draw(st.sampled_from(NODES))
        steps.append(Step(verb, node, group, tier, text, first, end))
    return mix, steps, texts


@settings(max_examples=300)
@given(histories(), st.lists(TEXTS, max_size=3))
def test_it_finds_what_a_brute_force_search_finds(
    history: tuple[tuple[str, ...], list[Step], list[Text]], others: list[Text]
) -> None:
    mix, steps, texts = history
    index, model, info = PrefixIndex(), Model(mix), info_of(mix)
    for node in NODES:
        index.set_node(node, info)
    for step in steps:
        if step.verb == "clear":
            index.apply(step.node, [AllBlocksCleared()])
            model.clear(step.node)
        elif step.verb == "leave":
            index.remove_node(step.node)
            index.set_node(step.node, info)
            model.clear(step.node)
        else:
            index.apply(step.node, [event_of(step, GROUPS[mix[step.group]])])
            held = model.of(step.node, step.group, step.tier)
            for text in texts_of(step, GROUPS[mix[step.group]]):
                held[text] = max(0, held[text] + (1 if step.verb == "store" else -1))
    for text in (*texts, *others):
        found = index.hits(prompt_of(text))
        for node in NODES:
            expected = model.hit(node, text)
            hit = astuple(found.get(node, NodeHit()))
            assert hit == pytest.approx(astuple(expected)), (node, text)
    counted = {node: 0 for node in NODES}
    for (node, _, _), held in model.held.items():
        counted[node] += sum(1 for copies in held.values() if copies)
    assert index.num_entries == counted


def chain(text: Text, group: int = 0, *, first: int = 0, medium: str = GPU) -> BlockStored:
    end = len(text[1]) // SIZE
    return event_of(Step("store", "a", group, medium, text, first, end), FULL)  # type: ignore[return-value]


TEXT: Text = (None, tuple(range(100, 120)))


def test_salted_prompts_meet_no_others() -> None:
    index = PrefixIndex()
    index.set_node("a", info_of(["full", "state"]))
    salted: Text = ("tenant", TEXT[1])
    for group, info, end in ((0, FULL, 5), (1, STATE, 16), (1, STATE, 3)):
        index.apply("a", [event_of(Step("store", "a", group, GPU, salted, 0, end), info)])
    assert index.hits(prompt_of(salted)) == {"a": NodeHit(16, 16)}
    assert index.hits(prompt_of(TEXT)) == {}
    assert index.hits(prompt_of(("other", TEXT[1]))) == {}


def test_another_seed_meets_nothing() -> None:
    index = PrefixIndex()
    index.set_node("a", info_of(["full"]))
    index.set_node("b", info_of(["full"], seed="s"))
    index.apply("a", [chain(TEXT)])
    hashes = tuple(digests_of(TEXT, "s").boundaries()[1:3])
    index.apply("b", [BlockStored(hashes, None, TEXT[1][:8], SIZE, medium=GPU, group_idx=0)])
    assert index.hits(prompt_of(TEXT)) == {"a": NodeHit(16, 16), "b": NodeHit(8, 8)}


def test_nodes_of_two_models_share_no_table() -> None:
    index, info = PrefixIndex(), info_of(["full"])
    index.set_node("a", info)
    index.set_node("b", structs.replace(info, model_identity="another"))
    for node in ("a", "b"):
        index.apply(node, [chain(TEXT)])
    assert index.hits(prompt_of(TEXT)) == {"a": NodeHit(16, 16), "b": NodeHit(16, 16)}
    assert [it.nodes.bit_count() for it in index._layouts.values()] == [1, 1]


def test_a_clear_is_at_once_and_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    for node in ("a", "b"):
        index.set_node(node, info_of(["full"]))
        index.apply(node, [chain(TEXT)])
    for _ in range(3):
        index.clear("a")
        assert index.hits(prompt_of(TEXT)) == {"b": NodeHit(16, 16)}
        index.apply("a", [chain((None, TEXT[1][:8]))])
        assert index.hits(prompt_of(TEXT)) == {"a": NodeHit(8, 8), "b": NodeHit(16, 16)}
    index.clear("a")
    index.remove_node("b")
    for _ in range(20):  # each call sweeps a piece
        index.apply("a", [])
    assert index.num_entries == {"a": 0}
    (layout,) = index._layouts.values()
    assert not any(table.nodes or table.copies for table in layout.tables)


@pytest.mark.parametrize(("end", "resumable"), [(9, 0), (10, 0), (11, 11), (12, 12)])
def test_inside_a_block_a_window_begins_earlier(end: int, resumable: int) -> None:
    """After 9 tokens a window of 8 reads token 2, in block 0; after 11 it reads token 4."""
    index = PrefixIndex()
    index.set_node("a", info_of(["window", "state"]))
    for group, info, first, last in ((0, GROUPS["window"], 1, 3), (1, STATE, 0, end)):
        index.apply("a", [event_of(Step("store", "a", group, GPU, TEXT, first, last), info)])
    assert index.hits(prompt_of(TEXT)) == {"a": NodeHit(12, resumable)}


def test_checkpoints_that_go_leave_nothing_behind() -> None:
    index, salted = PrefixIndex(), ("s", TEXT[1])
    index.set_node("a", info_of(["state"]))
    steps = [Step("store", "a", 0, GPU, text, 0, end) for text in (TEXT, salted) for end in (3, 7)]
    for verb in ("store", "remove"):
        index.apply("a", [event_of(step._replace(verb=verb), STATE) for step in steps])
    (layout,) = index._layouts.values()
    for table in layout.tables:
        assert isinstance(table, CheckpointTable)
        assert not (table.nodes or table.tails or table._ends)


def test_what_is_not_meant_for_it_is_passed_over() -> None:
    index = PrefixIndex()
    index.apply("stranger", [chain(TEXT)])
    index.set_node("a", info_of(["full"]))
    coarse = BlockStored(
        tuple(digests_of(TEXT).boundaries()[2:3]), None, TEXT[1][:8], 8, medium=GPU
    )
    nowhere = BlockStored(chain(TEXT).block_hashes, None, TEXT[1], SIZE, medium="TAPE", group_idx=0)
    index.apply("a", [coarse, nowhere, chain(TEXT, group=7)])
    assert index.num_entries == {"a": 0}
    assert index.hits(prompt_of(TEXT)) == {}


def test_events_of_groups_and_lengths_that_cannot_be_take_no_memory() -> None:
    index = PrefixIndex()
    index.set_node("a", info_of(["full", "state"]))
    hashes = chain(TEXT).block_hashes
    for number in range(1, 50):
        index.apply("a", [chain(TEXT, group=-number), BlockRemoved(hashes, GPU, -number)])
        index.apply("a", [BlockRemoved(hashes, GPU, number % 2)])
        for length in (0, -number, SIZE + number):
            index.apply("a", [BlockStored(hashes[:1], None, (), length, medium=GPU, group_idx=1)])
    (layout,) = index._layouts.values()
    assert index.num_entries == {"a": 0}
    assert len(layout.tables) <= 2
    assert not any(table.nodes for table in layout.tables)


def test_a_node_that_announces_without_end_fills_its_share_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_ENTRIES", 4)
    index = PrefixIndex()
    for node in ("a", "b"):
        index.set_node(node, info_of(["full"]))
    other: Text = (None, tuple(range(900, 908)))
    # What came first stays; what finds no room is not promised.
    index.apply("a", [chain((None, TEXT[1][:12])), chain(other), chain(TEXT)])
    index.apply("b", [chain(other)])
    assert index.num_entries == {"a": 3, "b": 2}
    longer: Text = (None, (*other[1], 1))
    assert index.hits(prompt_of(longer)) == {"b": NodeHit(8, 8)}
    assert index.hits(prompt_of(TEXT)) == {"a": NodeHit(12, 12)}
    index.apply("a", [BlockRemoved(chain((None, TEXT[1][:12])).block_hashes, GPU, 0), chain(other)])
    assert index.hits(prompt_of(longer)) == {"a": NodeHit(8, 8), "b": NodeHit(8, 8)}


def test_a_node_that_restarts_as_another_leaves_no_tables_behind() -> None:
    index = PrefixIndex()
    index.set_node("b", info_of(["full"]))
    for seed in range(20):
        info = info_of(["full", "state"] if seed % 2 else ["full"], seed=f"{seed}")
        index.set_node("a", info)
        index.apply("a", [chain(TEXT)])
        assert index.num_entries == {"a": 5, "b": 0}
    index.remove_node("a")
    for _ in range(60):  # each call sweeps a piece
        index.apply("b", [])
    assert len(index._layouts) == 1
    for _ in range(20):
        index.set_node("a", info_of(["state"]))
        index.remove_node("a")
    assert (len(index._layouts), len(index._sweeps)) == (1, 0)


def test_prompts_shorter_than_a_hash_block_are_asked_too() -> None:
    index = PrefixIndex()
    index.set_node("a", info_of(["full", "state"]))
    assert index.hits(prompt_of((None, (1,)))) == {}
