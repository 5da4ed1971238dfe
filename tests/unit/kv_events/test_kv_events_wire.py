"""KV events in every published form: theirs are read here, ours there, and rubbish is named."""

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import KVEventError
from serving.kv_events.wire import (
    MAX_PAYLOAD_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineStored,
    EventBatch,
    Form,
    decode,
    encode,
    salt_key,
)
from tests.support.cache.published_events import FORMS, TODAY, PublishedForm

SIGNED, UNSIGNED = -3, 2**64 - 3
VALUES: dict[str, Any] = {
    "lora_id": 4,
    "medium": "CPU",
    "lora_name": "adapter",
    "extra_keys": [("s", "adapter"), None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
    "locality": "LOCAL",
    "ownership": "own",
    "session_id": "conversation",
    "cache_salt": "s",
}


def some_of(kind: Any, *values: Any) -> Any:
    """An event with a value in each field that this form has."""
    own = kind.__struct_fields__[len(values) :]
    return kind(*values, **{name: VALUES[name] for name in own})


def as_ours(kind: type[Any], theirs: Any, **changed: Any) -> Any:
    """The fields that both know, without what is not read."""
    known = {name: getattr(theirs, name) for name in theirs.__struct_fields__}
    both = {name: known[name] for name in kind.__struct_fields__ if name in known} | changed
    if "extra_keys" in both:
        both["extra_keys"] = None
    return kind(**both)


def hashes(form: PublishedForm, number: int) -> tuple[Any, Any]:
    """A pair as it is sent, and as it is read."""
    if form.takes_bytes:
        return [b"a" * 32, b"b" * 32], (b"a" * 32, b"b" * 32)
    return [number, 7], (number % 2**64, 7)


@pytest.mark.parametrize("number", [SIGNED, UNSIGNED, 5])
@pytest.mark.parametrize("name", FORMS)
def test_every_published_form_is_read(name: str, number: int) -> None:
    form = FORMS[name]
    sent, read = hashes(form, number)
    stored = some_of(form.stored, sent, sent[0], [1, 2, 3, 4], 2)
    removed = some_of(form.removed, sent)
    batch = decode(form.encode(stored, removed, form.cleared(), rank=3))
    wanted = as_ours(
        BlockStored, stored, block_hashes=read, parent_block_hash=read[0], token_ids=(1, 2, 3, 4)
    )
    gone = as_ours(BlockRemoved, removed, block_hashes=read)
    assert batch.events == (wanted, gone, AllBlocksCleared())
    assert (batch.ts, batch.incarnation, batch.num_unknown) == (1.5, None, 0)
    assert batch.data_parallel_rank == 3


@pytest.mark.parametrize("name", FORMS)
def test_fields_that_are_not_set_are_none(name: str) -> None:
    form = FORMS[name]
    sent, read = hashes(form, 9)
    required = [f.name for f in msgspec.structs.fields(form.stored) if f.required][4:]
    empty = form.stored(sent, None, [1, 2], 1, **dict.fromkeys(required))
    (event,) = decode(form.encode(empty)).events
    assert event == BlockStored(read, None, (1, 2), 1)


OURS = EventBatch(
    2.5,
    (
        BlockStored(
            (b"a" * 32, b"b" * 32),
            None,
            (1, 2),
            1,
            medium="GPU",
            extra_keys=(("s",), None),
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        ),
        BlockStored(
            (b"c" * 32,),
            b"b" * 32,
            (3,),
            1,
            medium="GPU",
            group_idx=2,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=64,
        ),
        BlockRemoved((b"a" * 32,), "GPU", 1),
        AllBlocksCleared(),
    ),
    incarnation="decode-1",
)


@pytest.mark.parametrize(
    "name", [n for n, form in FORMS.items() if form.takes_bytes and "batch too" not in n]
)
def test_every_published_decoder_reads_ours(name: str) -> None:
    form = FORMS[name]
    batch = form.decode(encode(OURS, "array" if form.is_array else "map"))
    assert batch.ts == 2.5
    assert [type(event).__name__ for event in batch.events] == [
        "BlockStored",
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    ]
    for theirs, ours in zip(batch.events, OURS.events, strict=True):
        for field in set(theirs.__struct_fields__) & set(ours.__struct_fields__):
            mine, their = getattr(ours, field), getattr(theirs, field)
            assert (tuple(their) if isinstance(their, list) else their) == mine, field


@pytest.mark.parametrize("name", ["vllm maps", "vllm maps of today"])
def test_ours_are_today_s_bytes(name: str) -> None:
    """All but the incarnation, which stands after the last field of theirs."""
    form = FORMS[name]
    theirs = [
        getattr(form, {"BlockStored": "stored", "BlockRemoved": "removed"}.get(kind, "cleared"))(
            *(list(value) if isinstance(value, tuple) else value for value in values)
        )
        for event in OURS.events
        for kind, values in [(type(event).__name__, msgspec.structs.astuple(event))]
    ]
    published = msgspec.msgpack.encode(form.batch(2.5, theirs))
    assert encode(msgspec.structs.replace(OURS, incarnation=None)) == published
    assert encode(OURS) == b"\x94" + published[1:] + msgspec.msgpack.encode("decode-1")


@pytest.mark.parametrize("form", ["map", "array"])
def test_ours_come_back_as_they_were(form: Form) -> None:
    first, *others = OURS.events
    read = (msgspec.structs.replace(first, extra_keys=None), *others)
    assert decode(encode(OURS, form)) == msgspec.structs.replace(OURS, events=read)


def stored_with(**changed: Any) -> EngineStored:
    event = dict(block_hashes=[1, 2], parent_block_hash=None, token_ids=[1, 2], block_size=1)
    payload = msgspec.msgpack.encode([1.0, [{"type": "BlockStored", **event, **changed}]])
    (read,) = decode(payload, is_foreign=True).events
    assert isinstance(read, EngineStored)
    return read


def test_a_foreign_engine_s_keys_are_read_when_they_are_asked_for() -> None:
    salt = msgspec.msgpack.encode(["s"])
    assert salt == salt_key("s")
    assert stored_with().keys() == stored_with(extra_keys=None).keys() == [b"", b""]
    assert stored_with(extra_keys=[["s"], None]).keys() == [salt, b""]
    assert stored_with(cache_salt="s").keys() == [salt, b""]
    assert stored_with(cache_salt="s", parent_block_hash=7).keys() == [b"", b""]
    adapter = msgspec.msgpack.encode([None, "a"])
    assert stored_with(lora_name="a", extra_keys=[["s"], None]).keys() == [adapter + salt, adapter]
    for wrong in ([None], [None] * 3, [None] * 70_000, {"a": 1}, "text", 5):
        with pytest.raises(KVEventError, match="no array of 2"):
            stored_with(extra_keys=wrong).keys()


def test_keys_that_may_be_anything_cost_their_bytes_until_then() -> None:
    tracemalloc.start()
    try:
        event = stored_with(extra_keys=[[]] * 500_000)
        kept, peak = tracemalloc.get_traced_memory()
        with pytest.raises(KVEventError):
            event.keys()
        peak = max(peak, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert (kept < 2_000_000) and (peak < 8_000_000)


@pytest.mark.parametrize("is_foreign", [False, True])
def test_what_is_another_machine_s_is_left_out(is_foreign: bool) -> None:
    here, there = ({"type": "BlockRemoved", "block_hashes": [n], "locality": place}
                   for n, place in enumerate(("LOCAL", "REMOTE")))  # fmt: skip
    for batch in ([1.0, [here, there]], [1.0, [here, there, ["New"]]]):
        read = decode(msgspec.msgpack.encode(batch), is_foreign=is_foreign)
        assert read.events == (BlockRemoved((0,)),)


def test_an_unknown_event_is_left_out_and_counted() -> None:
    row = ["BlockMoved", [b"a"], "GPU"]
    known = [{"type": "BlockRemoved", "block_hashes": [b"a"], "medium": None}, {"type": "New"}]
    batch = decode(msgspec.msgpack.encode([1.0, [*known, row], None]))
    assert (batch.events, batch.num_unknown) == ((BlockRemoved((b"a",)),), 2)


def test_maps_and_arrays_may_stand_in_one_batch() -> None:
    row = ["BlockRemoved", [-1], "CPU"]
    known = {"type": "BlockRemoved", "block_hashes": [b"a"], "later": {"x": [1]}}
    batch = decode(msgspec.msgpack.encode({"ts": 1, "events": [known, row], "more": 2}))
    assert batch.events == (BlockRemoved((b"a",)), BlockRemoved((2**64 - 1,), "CPU"))


@pytest.mark.parametrize("fourth", [None, 5, {"a": 1}, [1]])
def test_a_fourth_element_of_others_is_no_incarnation(fourth: object) -> None:
    batch = decode(msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}], 0, fourth, "x"]))
    assert (batch.events, batch.incarnation) == ((AllBlocksCleared(),), None)


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (b"", "truncated"),
        (b"\xc1", "no batch of KV events"),
        (msgspec.msgpack.encode("text"), "Expected `object`"),
        (msgspec.msgpack.encode([1.0]), "length"),
        (msgspec.msgpack.encode({"events": []}), "`ts`"),
        (msgspec.msgpack.encode([1.0, [["BlockStored", 5]]]), r"\[0\]|Expected `array`"),
        (msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}]]), "`block_hashes`"),
        (msgspec.msgpack.encode([1.0, [{"type": 5}]]), "Expected `str`"),
        (msgspec.msgpack.encode([1.0, [[]]]), "length"),
        (
            msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [b"x" * 65]}]]),
            "length <= 64",
        ),
        (b"\x91" * 100_000, "no batch of KV events"),
        (bytes(MAX_PAYLOAD_BYTES + 1), "exceeds"),
    ],
)
def test_what_is_no_batch_is_refused_by_name(payload: bytes, told: str) -> None:
    with pytest.raises(KVEventError, match=told):
        decode(payload)


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_damaged_bytes_are_read_or_refused(junk: bytes, place: int, value: int) -> None:
    good = bytearray(TODAY.encode(TODAY.stored([b"a" * 32], None, [1, 2], 2, None, "GPU", None)))
    good[place % len(good)] = value
    for payload in (junk, bytes(good), bytes(good[: place % len(good)]), b"\x93" + junk):
        try:
            batch = decode(payload)
        except KVEventError:
            continue
        assert isinstance(batch, EventBatch)
