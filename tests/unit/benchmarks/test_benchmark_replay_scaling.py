"""What a replay sends: traces made smaller in time and length share what they shared."""

from itertools import takewhile

import pytest

from benchmarks.serving.replay import Limits, ReplayOptions, ids_of
from benchmarks.support.model_folders import DEMO_MODEL
from benchmarks.workloads.catalogue import WORKLOADS
from benchmarks.workloads.traces import ideal_hits, requests_of
from engine.errors import ConfigError

IDS = range(2, 4096)


@pytest.mark.parametrize("name", ["G1", "G2", "G4"])
def test_the_printed_ideal_is_that_of_the_tokens_that_are_sent(name: str) -> None:
    """Token by token, against every prompt before; random ids may meet by chance at a fork."""
    scaled = Limits(512, 16, 10.0).scale(WORKLOADS[name].make(0.03, 1)[:40])
    prompts = [one.prompt for one in requests_of(scaled.records, IDS, stamps=True)]
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
    thinking = requests_of(scaled.records, IDS, time_scale=scaled.time_scale)
    stamped = requests_of(scaled.records, IDS, time_scale=scaled.time_scale, stamps=True)
    for place in later:
        gap = scaled.records[place].think_time or 0
        assert thinking[place].think_s == pytest.approx(gap / 1000 * scaled.time_scale)
        assert thinking[place].session and not stamped[place].session
    times = [one.arrival_s for one in stamped]
    assert times == sorted(times) and times[-1] == pytest.approx(10.0)


def test_a_target_gets_only_ids_that_its_model_has() -> None:
    """Those of a tokenizer, or few enough for any; the demo's model has 832."""
    demo = str(DEMO_MODEL)
    known = ids_of(ReplayOptions(target="http://one", tokenizer=demo))
    assert 600 < len(known) <= max(known) + 1 <= 832
    assert max(ids_of(ReplayOptions(target="http://one"))) < 256
    assert max(ids_of(ReplayOptions())) == 4095
    with pytest.raises(ConfigError, match="absent"):
        ids_of(ReplayOptions(target="http://one", tokenizer="absent"))
