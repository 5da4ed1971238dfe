"""What a replay sends: traces made smaller in time and length share what they shared."""

from itertools import takewhile

import pytest

from benchmarks.replay import Limits, requests_of
from benchmarks.workloads.catalogue import WORKLOADS
from benchmarks.workloads.traces import ideal_hits


@pytest.mark.parametrize("name", ["G1", "G2", "G4"])
def test_the_printed_ideal_is_that_of_the_tokens_that_are_sent(name: str) -> None:
    """Token by token, against every prompt before; random ids may meet by chance at a fork."""
    scaled = Limits(512, 16, 10.0).scale(WORKLOADS[name].make(0.03, 1)[:40])
    prompts = [one.prompt for one in requests_of(scaled, stamps=True, is_own=True)]
    ideals = ideal_hits(scaled.records)
    for number, (prompt, ideal) in enumerate(zip(prompts, ideals, strict=True)):
        assert len(prompt) == scaled.records[number].input_length <= 512 + 60
        known = max((common(prompt, earlier) for earlier in prompts[:number]), default=0)
        assert 0 <= min(known, len(prompt) - 1) - ideal <= 2


def common(one: tuple[int, ...] | str, other: tuple[int, ...] | str) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_turns_think_or_come_at_their_own_times() -> None:
    scaled = Limits(512, 16, 10.0).scale(WORKLOADS["G1"].make(0.03, 1)[:60])
    later = [place for place, one in enumerate(scaled.records) if one.parent is not None]
    assert later
    thinking = requests_of(scaled, stamps=False, is_own=False)
    stamped = requests_of(scaled, stamps=True, is_own=False)
    for place in later:
        gap = scaled.records[place].think_time or 0
        assert thinking[place].think_s == pytest.approx(gap / 1000 * scaled.time_scale)
        assert thinking[place].session and not stamped[place].session
    times = [one.arrival_s for one in stamped]
    assert times == sorted(times) and times[-1] == pytest.approx(10.0)
