"""Events of other projects' engines become an index that names what a prompt finds there."""

import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.types import GenerateRequest
from proxy.routing import engine_hashes
from proxy.routing.engine_hashes import DOUBT_S, EngineHashes
from proxy.routing.event_sources import EventSources
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import NO_HIT, NodeHit, RoutedPrompt
from proxy.routing.waiting_blocks import MAX_WEIGHT
from serving.kv_events.follower import SourceFollower
from serving.rpc.messages import KVEventsInfo, NodeInfo
from tests.support.cache.announcing_engine import (
    FULL,
    HYBRID,
    SIZE,
    STATES,
    TAIL,
    Announced,
    Reader,
    Text,
    life,
    payload,
    prompt_of,
    removed,
    some_text,
    stored,
)
from tests.support.cache.published_events import FORMS, TODAY

RECORDED = Path(__file__).parent / "vllm_hybrid_events.msgpack"
TEXTS = sorted({some_text(Random(seed)) for seed in range(24)}, key=repr)
TEXT: Text = (None, tuple(range(4 * SIZE + 3)))
DENSE = replace(HYBRID, groups=HYBRID.groups[:1])
CLEARED: Announced = {"type": "AllBlocksCleared"}


class Followed:
    """An index with one engine, behind a follower that hears batches in order."""

    def __init__(self, info: KVEventsInfo = HYBRID, *, has_replay: bool = False) -> None:
        self.index, self.now, self.numbers = PrefixIndex(), 0.0, count()
        self.index.set_node("e", info)
        self.engine = EngineHashes(self.index, info)
        self.follower = SourceFollower("e", self.engine, has_replay, now=0.0, is_foreign=True)

    def hear(self, *events: Announced, **changed: Any) -> None:
        self.take(payload(events, ts=float(number := next(self.numbers)), **changed), number)

    def take(self, data: bytes, number: int | None = None) -> None:
        self.follower.heard(next(self.numbers) if number is None else number, data, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(3):
            self.follower.tick(self.now)

    def hit(self, text: Text = TEXT) -> NodeHit:
        return self.index.hits(prompt_of(text)).get("e", NO_HIT)


def blocks(text: Text, start: int, end: int, group: int = FULL, **more: Any) -> Announced:
    return stored(text, range(start + SIZE, end + 1, SIZE), start=start, group=group, **more)


def states(text: Text, end: int, *, start: int = 0) -> list[Announced]:
    return [stored(text, [end], start=start, group=group) for group in STATES]


# --- vLLM's own events ---------------------------------------------------------------------------


def test_what_vllm_s_cache_manager_said_of_a_hybrid_names_attention_and_checkpoints() -> None:
    """Against its counted hashes, prompt by prompt, and against its own lookup.

    Routers that take attention alone: llm-d-router #2362, llm-d-kv-cache #336; that drop hybrids:
    Infera #98. A hit reaches to the last checkpoint: Dynamo #12169, vLLM #45238, #53595.
    """
    recorded = msgspec.msgpack.decode(RECORDED.read_bytes())
    size, prompts = recorded["block_size"], recorded["prompts"]
    per_block = size // recorded["hash_block_size"]
    engine = Followed(replace(HYBRID, hash_block_size=size))
    held: dict[int, Counter[int]] = {}
    num_tails = 0
    for step in recorded["steps"]:
        engine.take(step["payload"])
        for event in msgspec.msgpack.decode(step["payload"])[1]:
            match event["type"]:
                case "AllBlocksCleared":
                    held.clear()
                case "BlockStored":
                    num_tails += event["block_size"] < size
                    held.setdefault(event["group_idx"], Counter()).update(event["block_hashes"])
                case _:
                    held[event["group_idx"]].subtract(event["block_hashes"])
        full, *groups = (held.get(group, Counter()) for group in (FULL, *STATES))
        for prompt, theirs in zip(prompts, step["hits"], strict=True):
            found = engine.hit((prompt["salt"], tuple(prompt["tokens"])))
            ends = prompt["hashes"][per_block - 1 :: per_block][
                : (len(prompt["tokens"]) - 1) // size
            ]
            has = next((n for n, each in enumerate(ends) if not full[each]), len(ends))
            stands = [n + 1 for n in range(has) if all(group[ends[n]] for group in groups)]
            assert found == NodeHit(size * has, size * max(stands, default=0))
            assert found.resumable == theirs
    # The hash before most tails is one that was never announced.
    assert 0 < engine.engine.num_unplaced < num_tails


# --- every form, against replayed events --------------------------------------------------------


def in_another_order(step: Sequence[Announced], rng: Random) -> list[Announced]:
    """Groups one after the other, in any order; each in its own."""
    if CLEARED in step:
        return list(step)
    order = rng.sample(range(3), 3)
    return sorted(step, key=lambda event: order.index(event["group_idx"]))


@settings(max_examples=30)
@given(st.integers(0, 10**9), st.sampled_from([name for name in FORMS if "groups" in name or
                                               "vllm maps" in name]), st.booleans())  # fmt: skip
def test_a_life_is_found_as_its_replayed_events_say(seed: int, form: str, as_bytes: bool) -> None:
    engine, rng = Followed(), Random(seed)
    reader, sure = Reader(counts_copies=True), Reader(counts_copies=False)
    for step in life(rng, 12):
        events = in_another_order(step, rng)
        reader.read(events)
        sure.read(events)
        engine.hear(*(in_bytes(events) if as_bytes else events), form=FORMS[form])
        for text in TEXTS:
            assert engine.hit(text) == reader.hit(text), text
    engine.wait(DOUBT_S)
    for text in TEXTS:
        assert engine.hit(text) == sure.hit(text), text
    assert engine.follower.stats.num_garbage == 0


def in_bytes(events: Sequence[Announced]) -> list[Announced]:
    """With hashes of 32 bytes, as engines send them that are told to."""

    def whole(block_hash: int | None) -> bytes | None:
        return None if block_hash is None else block_hash.to_bytes(8, "big") * 4

    return [
        {**event, "block_hashes": [whole(each) for each in event["block_hashes"]]}
        | ({"parent_block_hash": whole(event["parent_block_hash"])} if "token_ids" in event else {})
        if "block_hashes" in event
        else event
        for event in events
    ]


@settings(max_examples=30)
@given(st.integers(0, 10**9))
def test_lost_repeated_and_shuffled_events_promise_no_more_than_they_say(seed: int) -> None:
    engine, reader, rng = Followed(), Reader(counts_copies=True), Random(seed)
    engine.hear(*states((None, (9,) * SIZE), SIZE))  # as many groups as there are
    events = [event for step in life(rng, 20) for event in step]
    for _ in range(len(events) // 3):
        first, second = rng.randrange(len(events)), rng.randrange(len(events))
        events[first], events[second] = events[second], events[first]
        events.insert(first, events[second])
        events.pop(second)
    for start in range(0, len(events), 3):
        batch = events[start : start + 3]
        reader.read(batch)
        engine.hear(*batch)
        for text in TEXTS:
            found, told = engine.hit(text), reader.hit(text)
            assert found.attention <= told.attention
            assert found.resumable <= told.resumable


@settings(max_examples=150)
@given(st.integers(0, 10**9), st.binary(max_size=60))
def test_rubbish_breaks_nothing_and_a_clear_ends_it(seed: int, junk: bytes) -> None:
    engine, reader, rng = Followed(), Reader(counts_copies=True), Random(seed)
    for step in life(rng, 10):
        data = bytearray(payload(step))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.choice(
                (0, 1, 0x90, 0xC0, 0xFF, rng.randrange(256))
            )
        engine.take(bytes(data))
        engine.take(junk)
        engine.wait(DOUBT_S / 3)
    assert engine.engine.num_held < 10_000
    engine.follower.heard(0, payload([CLEARED], ts=1e9), engine.now)
    engine.numbers = count(1)
    engine.engine.clear("e")  # also the groups, which are learned once in a life
    for step in life(rng, 10):
        reader.read(step)
        engine.hear(*step)
        for text in TEXTS[:20]:
            assert engine.hit(text) == reader.hit(text)


FEW = st.integers(0, 6)
CONFUSED = st.fixed_dictionaries(
    dict(
        type=st.sampled_from(["BlockStored", "BlockStored", "BlockRemoved"]),
        block_hashes=st.lists(FEW, max_size=3),
        parent_block_hash=st.none() | FEW,
        token_ids=st.lists(st.sampled_from([1, 1, 1, 2, -1]), max_size=12),
        block_size=st.sampled_from([-4, 0, 2, 3, 4, 4, 6, 8, 10**6]),
        lora_id=st.none(),
        lora_name=st.none() | st.just("a"),
        medium=st.sampled_from([None, "GPU", "DISK", "nowhere"]),
        extra_keys=st.none() | st.lists(st.none() | st.just(["s"]), max_size=3),
        group_idx=st.sampled_from([None, 0, 0, 1, 2, -1, 10**9]),
        kv_cache_spec_kind=st.sampled_from([None, "full_attention", "mamba", "sliding_window"]),
        kv_cache_spec_sliding_window=st.sampled_from([None, -1, 0, 5, 2**60]),
    )
)


@settings(max_examples=200)
@given(st.lists(st.lists(CONFUSED, max_size=4), max_size=12), st.integers(0, 2))
def test_a_confused_engine_breaks_nothing_and_leaves_nothing(
    steps: list[list[Announced]], num_lost: int
) -> None:
    engine = Followed()
    for number, step in enumerate(steps):
        exact = [event | {"token_ids": [1] * (len(event["block_hashes"]) * event["block_size"])}
                 if 0 < event["block_size"] < 10 and number % 2 else event
                 for event in step]  # fmt: skip
        engine.hear(*exact)
        if number == num_lost:
            next(engine.numbers)
        engine.wait(DOUBT_S / 4)
        for text in TEXTS[:4]:
            assert engine.hit(text).attention < len(text[1])
    assert engine.engine.num_held <= 7 * 64
    # What is doubted as a whole ends, with all that was counted for it.
    next(engine.numbers)
    engine.hear()
    engine.wait(DOUBT_S)
    engine.wait(DOUBT_S)
    assert (engine.engine.num_held, engine.index.num_entries) == (0, {"e": 0})


@pytest.mark.parametrize("name", [name for name in FORMS if "sglang" in name])
def test_sglang_s_pages_are_one_group_in_which_nobody_resumes_a_hybrid(name: str) -> None:
    """It names no groups; what it says of states nobody knows."""
    form, sent = FORMS[name], [blocks(TEXT, k, k + SIZE) for k in range(0, 16, SIZE)]
    signed = [
        event | {"block_hashes": [event["block_hashes"][0] - 2**64]} if n == 3 else event
        for n, event in enumerate(sent)
    ]
    for info, resumable in ((replace(DENSE, publisher="sglang"), 16), (HYBRID, 0)):
        engine = Followed(info)
        engine.hear(*signed, form=form)
        assert engine.hit() == NodeHit(16, resumable)
        engine.hear(removed(TEXT, 16, FULL), form=form)
        assert engine.hit() == NodeHit(12, min(12, resumable))


def test_a_salt_is_found_in_both_projects_forms_and_adapters_never() -> None:
    salted: Text = ("s", TEXT[1])
    for form, event in (
        (TODAY, blocks(salted, 0, 16)),
        (FORMS["sglang maps"], blocks(salted, 0, 16) | {"cache_salt": "s"}),
    ):
        engine = Followed(DENSE)
        engine.hear(event, form=form)
        assert (engine.hit(salted), engine.hit()) == (NodeHit(16, 16), NO_HIT)
        assert engine.hit(("other", TEXT[1])) == NO_HIT
    for changed in ({"lora_id": 1}, {"lora_name": "a"}, {"extra_keys": [[["image", 0]]] * 4}):
        engine = Followed(DENSE)
        engine.hear(blocks(TEXT, 0, 16) | changed)
        assert (engine.hit(), engine.engine.num_held) == (NO_HIT, 4)
    engine = Followed(DENSE)
    engine.hear(blocks(TEXT, 0, 16) | {"extra_keys": [None]})
    assert (engine.engine.num_held, engine.engine.num_unplaced) == (0, 4)


# --- places ---------------------------------------------------------------------------------------


def test_the_copy_that_is_left_after_a_removal_counts_for_a_while_unless_it_is_stored_again() -> (
    None
):
    engine = Followed(DENSE)
    engine.hear(blocks(TEXT, 0, 16))
    engine.hear(blocks(TEXT, 0, 16))
    engine.wait(1.0)
    engine.hear(removed(TEXT, 16, FULL), removed(TEXT, 12, FULL))
    engine.hear(blocks(TEXT, 8, 12))
    assert engine.hit() == NodeHit(16, 16)
    engine.wait(DOUBT_S - 1)
    assert engine.hit() == NodeHit(16, 16)
    engine.wait(1.0)
    assert engine.hit() == NodeHit(12, 12)
    for number in (2, 3):
        engine.hear(removed(TEXT, 12, FULL))
        assert engine.hit() == NodeHit(*(((12,) if number == 2 else (8,)) * 2))


def test_a_hash_stays_as_long_as_any_group_or_tier_has_it() -> None:
    engine = Followed()
    engine.hear(blocks(TEXT, 0, 8), *states(TEXT, 8))
    # A tier that knows no tokens, and removals in the fast one.
    placeholder = blocks(TEXT, 4, 8, medium="CPU_PINNED")
    placeholder |= {"token_ids": [], "block_size": 0, "parent_block_hash": None}
    engine.hear(placeholder, blocks(TEXT, 0, 4, medium="DISK"))
    engine.hear(removed(TEXT, 8, FULL), removed(TEXT, 4, FULL))
    assert (engine.hit().attention, engine.hit().resumable) == (8, 8)
    assert engine.hit().attention_discount == pytest.approx(4 * 0.5 + 4 * 0.5)
    engine.hear(removed(TEXT, 8, FULL, "CPU"), *(removed(TEXT, 8, group) for group in STATES))
    engine.hear(blocks(TEXT, 4, 8))
    assert (engine.hit().attention, engine.hit().resumable) == (8, 0)


def test_larger_blocks_are_several_of_ours_and_odd_ones_end_inside() -> None:
    engine = Followed(DENSE)
    wide = stored(TEXT, [2 * SIZE, 4 * SIZE], start=0, group=FULL, size=2 * SIZE)
    engine.hear(wide | {"extra_keys": None})
    assert engine.hit() == NodeHit(16, 16)
    engine.hear(removed(TEXT, 16, FULL))
    assert engine.hit() == NodeHit(8, 8)
    engine = Followed()
    inside = [stored(TEXT, [SIZE + TAIL], start=0, group=g, size=SIZE + TAIL) for g in STATES]
    engine.hear(*inside, blocks(TEXT, 0, 16))
    assert engine.hit() == NodeHit(16, SIZE + TAIL)


def test_nothing_follows_a_tail() -> None:
    engine = Followed()
    tails = [stored(TEXT, [TAIL, 2 * TAIL], start=0, group=g, size=TAIL) for g in STATES]
    engine.hear(*tails, stored(TEXT, [SIZE + TAIL], start=TAIL, group=FULL), blocks(TEXT, 0, 4))
    assert engine.hit() == NodeHit(4, TAIL)
    assert engine.engine.num_unplaced == 3


def test_a_remote_cache_is_not_the_node_s() -> None:
    engine = Followed(DENSE)
    engine.hear(blocks(TEXT, 0, 16) | {"locality": "REMOTE"}, blocks(TEXT, 0, 4))
    engine.hear(removed(TEXT, 4, FULL) | {"locality": "REMOTE"})
    assert engine.hit() == NodeHit(4, 4)


def test_groups_are_learned_and_all_is_told_again() -> None:
    engine = Followed()
    engine.hear(blocks(TEXT, 0, 16))
    assert engine.hit() == NodeHit(16, 0)
    engine.hear(stored(TEXT, [16], start=0, group=2))
    assert engine.hit() == NodeHit(16, 0)  # of group 1 nothing is known
    engine.hear(stored(TEXT, [12], start=0, group=1))
    assert engine.hit() == NodeHit(16, 0)
    engine.hear(stored(TEXT, [16], start=0, group=1))
    assert engine.hit() == NodeHit(16, 16)
    # Another kind than before is a mistake, and a window is what it says.
    engine.hear(blocks(TEXT, 0, 16, group=1) | {"kv_cache_spec_kind": "full_attention"})
    assert engine.engine.num_unplaced == 4
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    engine.hear(blocks(TEXT, 8, 16) | window | {"group_idx": 3})
    assert engine.hit() == NodeHit(16, 16)
    engine.hear(removed(TEXT, 16, FULL) | {"group_idx": 3})
    assert engine.hit() == NodeHit(12, 0)


def test_a_checkpoint_that_was_removed_while_it_waited_is_gone() -> None:
    engine = Followed()
    engine.hear(*states(TEXT, 16), removed(TEXT, 16, 1))
    engine.hear(blocks(TEXT, 0, 16))
    assert engine.hit() == NodeHit(16, 0)
    engine.hear(stored(TEXT, [16], start=0, group=1))
    assert engine.hit() == NodeHit(16, 16)


# --- losses ---------------------------------------------------------------------------------------


def test_after_a_loss_only_what_is_confirmed_stays_and_a_second_one_renews_nothing() -> None:
    one, other = TEXT, (None, tuple(range(100, 120)))
    engine = Followed()
    engine.hear(blocks(one, 0, 12), *states(one, 12), blocks(other, 0, 12), *states(other, 12))
    next(engine.numbers)
    engine.hear()
    assert engine.hit(other) == engine.hit(one) == NodeHit(12, 12)
    engine.wait(DOUBT_S / 2)
    # Attention before it is confirmed by a block, its checkpoint is not.
    engine.hear(blocks(one, 12, 16))
    next(engine.numbers)
    engine.hear()
    engine.wait(DOUBT_S / 2)
    assert (engine.hit(one), engine.hit(other)) == (NodeHit(16, 0), NO_HIT)
    engine.hear(blocks(one, 0, 4), *states(one, 4))
    engine.wait(DOUBT_S / 2)
    assert engine.hit(one) == NodeHit(4, 4)
    engine.wait(10 * DOUBT_S)
    assert engine.hit(one) == NodeHit(4, 4)
    assert engine.follower.stats.num_gaps_lost == 2


def test_a_restart_and_a_clear_leave_nothing_to_doubt() -> None:
    engine = Followed()
    engine.hear(blocks(TEXT, 0, 16), *states(TEXT, 16))
    engine.follower.heard(0, payload([blocks(TEXT, 0, 4)], ts=9.0), 0.0)
    assert engine.hit() == NodeHit(4, 0)
    engine.hear(CLEARED)
    assert (engine.hit(), engine.engine.num_held) == (NO_HIT, 0)


def test_a_gap_is_repaired_where_the_buffer_has_it_and_doubted_where_not() -> None:
    """A router that restarts: vLLM #57789, sglang #33394, Dynamo #13044."""
    sent = [payload([blocks(TEXT, k, k + 4)], ts=float(k)) for k in (0, 4, 8, 12)]
    for answers, expected, later in (
        ([1, 2, 3, -1], NodeHit(16, 16), NodeHit(16, 16)),
        ([3, -1, 3, -1], NodeHit(8, 8), NO_HIT),
    ):
        engine = Followed(DENSE, has_replay=True)
        for number in (-1, 0, 1, -1):  # no snapshot, but all from the beginning
            engine.follower.answered(number, sent[number], 0.0)
        engine.take(sent[3], 3)
        for number in answers:
            engine.follower.answered(number, sent[number], 0.0)
        assert engine.hit() == expected
        engine.wait(DOUBT_S)
        assert engine.hit() == later


# --- bounds ---------------------------------------------------------------------------------------


def test_blocks_beyond_a_node_s_share_are_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_hashes, "MAX_ENTRIES", 3)
    engine = Followed(DENSE)
    engine.hear(blocks(TEXT, 0, 16))
    assert (engine.hit(), engine.engine.num_held, engine.engine.num_unplaced) == (
        NodeHit(12, 12),
        3,
        1,
    )


def test_blocks_that_are_gone_leave_no_memory_taken() -> None:
    engine = Followed(DENSE)
    tracemalloc.start()
    try:
        for number in range(5000):
            text = (None, (number,) * SIZE)
            engine.hear(blocks(text, 0, SIZE), removed(text, SIZE, FULL))
        # Of these modules alone: threads of other tests may live on.
        own = tracemalloc.Filter(True, "*/proxy/routing/*")
        traces = tracemalloc.take_snapshot().filter_traces([own]).statistics("filename")
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in traces) < 200_000


def test_what_waits_is_bounded_and_counted() -> None:
    """Blocks of a size that nobody expects are seen in the metrics: TRT-LLM #14882."""
    engine = Followed(DENSE)
    for number in range(MAX_WEIGHT // 2000 + 10):
        lost = (None, (number, *range(2000)))
        engine.hear(stored(lost, [2000], start=4, group=FULL, size=1996))
    assert 10 <= engine.engine.num_unplaced <= 13


def test_an_engine_is_followed_and_forgotten_by_what_it_says_of_itself() -> None:
    index, lost = PrefixIndex(), list[str]()
    sources = EventSources(index, lost.append)
    engine: Any = zmq.Context.instance().socket(zmq.PUB)
    endpoint = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"
    info = NodeInfo(
        engine_id="e-1",
        kind="decode",
        model_names=("tiny",),
        max_model_len=64,
        vocab_size=8,
        kv_events=replace(DENSE, endpoint=endpoint),
    )
    try:
        sources.follow("e", info)
        deadline = time.monotonic() + 30
        for number in count():  # until it listens
            data = payload([blocks(("s", TEXT[1]), 0, 16), blocks(TEXT, 8, 16)], ts=float(number))
            engine.send_multipart([b"", number.to_bytes(8, "big"), data])
            if index.hits(prompt_of(("s", TEXT[1]))) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        assert index.hits(prompt_of(("s", TEXT[1]))) == {"e": NodeHit(16, 16)}
        assert sources.stats()["e"].num_unplaced == 0  # two of them still wait
        sources.follow("e", replace(info, engine_id="e-2"))
        assert (index.num_entries, lost) == ({"e": 0}, ["e"])
        sources.forget("e")
        assert (index.num_entries, sources.stats()) == ({}, {})
    finally:
        sources.close()
        engine.close()


def test_engines_and_tandem_s_nodes_share_an_index_without_meeting() -> None:
    index = PrefixIndex()
    for name, publisher in (("ours", "tandem"), ("theirs", "vllm")):
        index.set_node(name, replace(DENSE, publisher=publisher))
    EngineHashes(index, DENSE).apply("theirs", [])
    prompt = RoutedPrompt(GenerateRequest(request_id="r", prompt_token_ids=TEXT[1]))
    assert index.hits(prompt) == {}
    assert len(prompt._digests) == 2
