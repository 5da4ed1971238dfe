"""The router simulator counts what it says: small clusters whose figures are worked out by hand."""

from functools import partial
from random import Random

import pytest

from benchmarks.cache.geometries import BLOCK_SIZE, GEOMETRIES
from benchmarks.cache.routing.agenda import Agenda
from benchmarks.cache.routing.event_feed import EventFeed, EventPath
from benchmarks.cache.routing.experiment import BASELINE, CANDIDATE, G1, Row, verdicts
from benchmarks.cache.routing.nodes import TOKEN_S, Hardware
from benchmarks.cache.routing.requests import Request, requests_of
from benchmarks.cache.routing.simulator import Outcome, Served, Simulator
from benchmarks.workloads.adversarial import Texts
from benchmarks.workloads.traces import Record, Segment, arrivals
from proxy.routing.prefix_index import PrefixIndex
from serving.kv_events.wire import GPU, BlockRemoved, BlockStored

QWEN = GEOMETRIES["Qwen3.5-4B"]
RATE, LINK = 1000.0, 1e9
OUTPUT = 1


def hardware(num_slots: int = 16) -> Hardware:
    return Hardware(QWEN, 8 << 30, RATE, BLOCK_SIZE, LINK, num_slots)


def pull_s(num_tokens: int) -> float:
    """With the states of all layers."""
    return (num_tokens * QWEN.token_bytes + QWEN.state_bytes) / LINK


def stream(*prompts: tuple[float, tuple[Segment, ...]]) -> list[Request]:
    """Prompts with their seconds of arrival."""
    texts = Texts()
    records = [texts.record(*segments) for _, segments in prompts]
    made = requests_of(records, BLOCK_SIZE)
    return [
        Request(at, request.prompt, request.hand_over, OUTPUT, None)
        for (at, _), request in zip(prompts, made, strict=True)
    ]


def served(policy: str, requests: list[Request], num_slots: int = 16) -> list[Served]:
    return Simulator(policy, 2, hardware(num_slots), path=EventPath()).run(requests)


def conversation() -> list[Request]:
    """A prompt of 1,600 tokens, another one, and the first with 400 more, long afterwards."""
    first, other, added = (1, 1600), (2, 800), (3, 400)
    return stream((0.0, (first,)), (10.0, (other,)), (20.0, (first, added)))


def test_a_continued_prompt_finds_its_states_where_they_are() -> None:
    """All nodes idle: the third resumes after 1,600 tokens, and its D lacks 400."""
    requests = served("prefix_aware", conversation())
    assert [request.num_hit for request in requests] == [0, 0, 1600]
    assert requests[2].prefill == requests[0].prefill != requests[1].prefill
    expected = [1.6 + pull_s(1600), 0.8 + pull_s(800), 0.4 + pull_s(400)]
    assert [request.ttft_s for request in requests] == pytest.approx(expected)


def test_in_turn_the_third_of_three_meets_the_first_again() -> None:
    requests = served("round_robin", conversation())
    assert [request.prefill for request in requests] == ["p0", "p1", "p0"]
    assert requests[2].num_hit == 1600


def test_a_third_prompt_waits_for_the_shorter_of_two() -> None:
    """Round robin gives it to the node that computes until 2.0 s; the other is free at 1.0 s."""
    assert pull_s(2000) > 0.1
    requests = stream((0.0, ((1, 2000),)), (0.0, ((2, 1000),)), (0.5, ((3, 100),)))
    in_turn, aware = served("round_robin", requests)[2], served("prefix_aware", requests)[2]
    assert (in_turn.prefill, aware.prefill) == ("p0", "p1")
    # The first prompt's pull takes longer than the third's prefill after it.
    assert in_turn.ttft_s == pytest.approx(2.0 - 0.5 + pull_s(2000) + pull_s(100))
    assert aware.ttft_s == pytest.approx(1.0 - 0.5 + 0.1 + pull_s(100))


def test_an_answer_waits_for_a_slot() -> None:
    """Round robin: the first and the third share a D with one slot, and the first holds it."""
    requests = stream((0.0, ((1, 100),)), (0.0, ((2, 100),)), (0.0, ((3, 50),)))
    long = Request(0.0, requests[0].prompt, requests[0].hand_over, 100, None)
    third = served("round_robin", [long, *requests[1:]], num_slots=1)[2]
    assert third.ttft_s == pytest.approx(0.1 + pull_s(100) + 100 * TOKEN_S)


def test_a_trap_catches_the_longest_prefix_alone() -> None:
    """On each node the second prompt finds no state where it parts from the first, later ones do.

    One node computes 8 at once after the first, or two nodes compute 4 each.
    """
    shared = (1, 512)
    prompts = [(10.0 * (n > 0), (shared, (n + 2, 512))) for n in range(9)]
    aware, trapped = (served(p, stream(*prompts)) for p in ("prefix_aware", "longest_prefix"))
    assert {request.prefill for request in trapped} == {trapped[0].prefill}
    assert {request.prefill for request in aware} == {"p0", "p1"}
    assert trapped[-1].ttft_s == pytest.approx(1.024 + 7 * 0.512 + pull_s(512))
    longest = max(request.ttft_s for request in aware)
    assert longest == pytest.approx(2 * 1.024 + 2 * 0.512 + pull_s(512))


def test_equal_stamps_are_spread_until_the_next() -> None:
    def record(stamp: float) -> Record:
        return Record(stamp, 1, 1, (0,))

    records = list(map(record, (5000, 5000, 6000, 60_000, 60_000, 60_000)))
    assert list(arrivals(records)) == [0.0, 0.5, 1.0, 55.0, 56.0, 57.0]


def test_a_lost_batch_is_repaired_some_seconds_after_the_next_one() -> None:
    """The second of three batches is lost; the third, at 2.1 s, shows it; 3 s later all is there.

    What is removed while the repair runs is in the snapshot, and nothing is applied twice.
    """
    agenda, index, lost = Agenda(), PrefixIndex(), iter((1.0, 0.0, 1.0, 1.0, 1.0, 1.0))

    class Losses(Random):
        def random(self) -> float:
            return next(lost)

    index.set_node("a", hardware().events())
    feed = EventFeed("a", index, agenda=agenda, path=EventPath(0.1, 0.5, 3.0), random=Losses())
    digests = [bytes([number] * 32) for number in range(3)]
    for second, digest in enumerate(digests):
        event = BlockStored((digest,), None, (), BLOCK_SIZE, medium=GPU, group_idx=1)
        agenda.after(float(second), partial(feed.send, [event]))
    agenda.after(3.0, lambda: feed.send([BlockRemoved((digests[0],), GPU, 1)]))
    # On its way while the snapshot is taken, which has it already; a second copy would stay.
    event = BlockStored((b"late" * 8,), None, (), BLOCK_SIZE, medium=GPU, group_idx=1)
    agenda.after(5.05, partial(feed.send, [event]))
    agenda.after(6.0, lambda: feed.send([BlockRemoved((b"late" * 8,), GPU, 1)]))
    seen: list[int] = []
    for at in (0.5, 2.5, 5.0, 5.5, 6.5):
        agenda.after(at, lambda: seen.append(index.num_entries["a"]))
    agenda.run()
    assert seen == [1, 1, 1, 3, 2]
    assert feed.num_repairs == 1


def test_figures_and_targets_of_three_requests() -> None:
    def request(ttft_s: float, num_hit: int, prefill: str) -> Served:
        return Served(ttft_s, 100, num_hit, prefill, 10.0)

    slow = Outcome.of([request(1.0, 0, "a"), request(2.0, 0, "b"), request(6.0, 30, "a")])
    assert (slow.hit_share, slow.mean_s, slow.busiest) == pytest.approx((0.1, 3.0, 2 / 3))
    assert (slow.p90_s, slow.p99_s) == pytest.approx((5.2, 5.92))
    fast = Outcome.of([request(1.0, 0, "a"), request(1.0, 0, "b"), request(4.0, 60, "a")])
    rows = [
        Row(G1, BASELINE, 0.1, slow),
        Row(G1, CANDIDATE, 0.1, fast),
        Row(G1, CANDIDATE, 0.01, fast),
        Row(G1, CANDIDATE, 5.0, slow),
    ]
    found = verdicts(rows, 0.1)
    assert [verdict.found for verdict in found] == pytest.approx([2 / 3, 0.1])
    assert [verdict.is_met for verdict in found] == [False, False]
