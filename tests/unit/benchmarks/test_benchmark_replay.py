"""The cache benchmarks count what they say: tiny streams whose figures are worked out by hand."""

from pathlib import Path

import pytest

from benchmarks.cache.adversarial import judge
from benchmarks.cache.decode_replay import DecodeNode, HandOver, hand_overs
from benchmarks.cache.geometries import BLOCK_SIZE, GEOMETRIES
from benchmarks.cache.layouts import prompts_held
from benchmarks.cache.policies import measure, workloads
from benchmarks.cache.prefill_replay import POLICIES, Tally, prompts_of, replay
from benchmarks.workloads.adversarial import Texts, cases
from benchmarks.workloads.traces import Record, write_trace
from engine.kv_cache.prefix import PrefixDigests

QWEN = GEOMETRIES["Qwen3.5-4B"]
MEMORY = 4 << 30


def served(records: list[Record], policy: str = "default", memory: int = MEMORY) -> Tally:
    return replay(prompts_of(records, BLOCK_SIZE), QWEN.units(memory), POLICIES[policy])


def three_questions() -> list[Record]:
    texts = Texts()
    document = texts.new(4096)
    return [texts.record(document, texts.new(question)) for question in (100, 50, 60)]


def test_a_document_asked_three_times() -> None:
    """Kept: 2,144 and 4,192 of the first; 4,096 and 4,144 of the second; 4,144 of the third."""
    tally = served(three_questions())
    assert (tally.requests, tally.tokens) == (3, 4196 + 4146 + 4156)
    assert (tally.ideal, tally.hits, tally.lost) == (2 * 4096, 2144 + 4096, 4096 - 2144)
    assert tally.writes == 5


@pytest.mark.parametrize(
    ("policy", "hits", "writes"),
    [
        ("last", 0, 3),
        ("last, branch point", 4096, 4),
        ("last, every 2,048", 2 * 4096, 3 + 2),
        ("every 512", 2 * 4096, 8),
    ],
)
def test_policies_differ_as_they_must(policy: str, hits: int, writes: int) -> None:
    tally = served(three_questions(), policy)
    assert (tally.hits, tally.writes) == (hits, writes)


def test_a_trace_is_served_in_its_own_blocks(tmp_path: Path) -> None:
    """Two prompts of three blocks of 512 tokens, of which two are the same."""
    file = tmp_path / "trace.jsonl"
    ids = ((1, 2, 3), (1, 2, 4))
    write_trace(file, [Record(at, 1536, 1, each) for at, each in enumerate(ids)])
    (stream,) = workloads(file, None, 0)
    rows = measure([stream], ["last"], [1.0], describe=lambda _: lambda: None)
    assert [(row.requests, row.of_ideal) for row in rows] == [(2, 1.0), (2, 1.0)]


def test_the_end_state_costs_no_write() -> None:
    """The second prompt goes on from the first one's 1,003 tokens, between two boundaries."""
    texts = Texts()
    first = texts.new(1003)
    tally = served([texts.record(first), texts.record(first, texts.new(20))])
    assert tally.hits == tally.ideal == 1003
    assert tally.writes == 2


def test_a_prompt_that_cannot_fit_is_counted_as_refused() -> None:
    texts = Texts()
    records = [texts.record(texts.new(100)), texts.record(texts.new(9000))]
    tally = served(records, memory=200 << 20)
    assert (tally.requests, tally.refused, tally.hits) == (2, 1, 0)


def test_prompts_between_blocks_lose_one_block_at_most() -> None:
    results = [judge(case) for case in cases() if "sweep" not in case.name]
    assert len(results) >= 8
    assert all(result.is_met is not False for result in results), results


def test_a_tenant_s_own_text_hits_and_nobody_else_s() -> None:
    texts = Texts()
    text = texts.new(160)
    records = [texts.record(text, texts.new(9), salt=salt) for salt in "aab"]
    prompts = prompts_of(records, BLOCK_SIZE)
    assert [prompt.ideal for prompt in prompts] == [0, 160, 0]


def test_inflated_pages_hold_one_block_or_one_state() -> None:
    assert [g.inflated_block_size for g in GEOMETRIES.values()] == [528, 784]
    for geometry in GEOMETRIES.values():
        plan = geometry.inflated(MEMORY)
        assert set(plan.blocks_per_unit) == {1}
        assert all(plan.waste(group) < 0.03 for group in range(len(plan.groups)))
        states = geometry.units(MEMORY).block_bytes(0)
        assert sum(plan.block_bytes(group) for group in range(len(plan.groups) - 1)) == states


def test_how_many_prompts_fit() -> None:
    """Units: a state each, and one block of a unit that 98 share. Inflated: four pages each."""
    plan = QWEN.units(MEMORY)
    assert (plan.num_units, plan.blocks_per_unit[1]) == (83, 98)
    assert prompts_held(plan, 12) == 82
    assert prompts_held(QWEN.inflated(MEMORY), 12) == MEMORY // (528 * QWEN.token_bytes) // 4


def test_a_hand_over_moves_what_the_decode_node_lacks() -> None:
    """First 1,000 tokens, then 1,200 of which it has 1,030 with its own answer; then the same."""
    texts = Texts()
    prompt, answer, more = texts.new(1000), texts.new(30), texts.new(170)
    first = texts.record(prompt)
    turn = Record(1, 1200, 5, (0, 1, 2), parent=0, segments=(prompt, answer, more))
    plan = QWEN.units(MEMORY)
    node = DecodeNode(plan)
    requests = list(hand_overs([first, turn], node.cache.hasher))
    assert [request.num_tokens for request in requests] == [1030, 1200]
    pulls = [node.serve(request) for request in [*requests, requests[1]]]
    block = plan.block_bytes(1)
    assert [pull.attention_bytes for pull in pulls] == [63 * block, (75 - 64) * block, 0]
    assert [pull.state_bytes for pull in pulls] == [plan.block_bytes(0)] * 2 + [0]


def test_a_hand_over_that_cannot_fit_is_an_error() -> None:
    node = DecodeNode(QWEN.units(200 << 20))
    prefix = PrefixDigests(node.cache.hasher, list(range(9000)), None)
    with pytest.raises(RuntimeError, match="9000 tokens does not fit"):
        node.serve(HandOver(prefix, 9000, 9000))
