"""The load core of the benchmarks without a server: pace, figures, files, what counts as equal."""

import asyncio
import math
import statistics
from pathlib import Path
from time import monotonic, perf_counter

import msgspec
import pytest
from rich.console import Console

from benchmarks.load.agreement import SALT, Agreement, Expected, check_beside, check_runs, tell
from benchmarks.load.client import Client
from benchmarks.load.loop import CLOSED, OWN_TIMES, Pace, Run, drive, starts
from benchmarks.load.reply import Reply
from benchmarks.load.request import Request, read_requests, salted, sessions_of, write_requests
from benchmarks.load.summary import Goodput, Summary, details, result
from benchmarks.serving.loads import load_of
from benchmarks.serving.options import ServingOptions
from benchmarks.serving.points import Measured, Point
from benchmarks.serving.rows import failures, rows_of
from benchmarks.support.model_folders import DEMO_MODEL
from benchmarks.workloads.traces import Record, write_trace
from engine.errors import ConfigError

USERS = 3


def reply(*chunks: float, text: str = "", ids: tuple[int, ...] = (), error: str = "") -> Reply:
    """Sent at 0; one token per chunk, ten of the prompt."""
    usage = {"prompt_tokens": 10, "completion_tokens": len(chunks)}
    return Reply(
        due=0.0,
        sent=0.0,
        ended=max(chunks, default=0.0),
        chunks=chunks,
        text=text,
        token_ids=ids,
        usage=usage,
        error=error,
    )


def alone(count: int) -> list[Request]:
    return [Request(prompt=f"prompt {n}", max_tokens=1, arrival_s=2.0 * n) for n in range(count)]


class Echo:
    """Answers each request with its number of requests under way, after some rounds of the loop."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.sent: list[Request] = []
        self.under_way = self.most = 0
        self._seconds = seconds

    async def __call__(self, request: Request, due: float | None = None) -> Reply:
        self.sent.append(request)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        sent = perf_counter()
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self.under_way -= 1
        now = perf_counter()
        said = f"<{len(self.sent)}>"
        return Reply(
            due=due or sent, sent=sent, ended=now, chunks=(now,), text=said, token_ids=(7,)
        )


async def test_a_closed_loop_has_so_many_users_and_tells_warm_up_apart() -> None:
    echo = Echo()
    run = await drive(echo, alone(20), Pace(at_once=USERS, warmup=4))
    assert echo.most == USERS
    assert [request.prompt for request in run.requests] == [f"prompt {n}" for n in range(4, 20)]
    assert (len(run.replies), len(run.warmup)) == (16, 4)
    assert max(reply.due for reply in run.warmup) <= min(reply.due for reply in run.replies)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(burstiness: float) -> None:
    """Of gamma gaps of shape k the coefficient of variation is 1 / sqrt(k)."""
    sessions = [[request] for request in alone(4000)]
    times = starts(sessions, Pace(rate=8.0, burstiness=burstiness, seed=3))
    assert times == sorted(times) and times[-1] == pytest.approx(500.0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    variation = statistics.pstdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_own_times_start_with_the_first_request() -> None:
    sessions = [[request] for request in alone(4)[1:]]
    assert starts(sessions, Pace(rate=OWN_TIMES)) == [0.0, 2.0, 4.0]
    assert starts(sessions, Pace(rate=CLOSED)) == [0.0, 0.0, 0.0]


async def test_an_open_loop_sends_nothing_before_it_is_due() -> None:
    run = await drive(Echo(), alone(30), Pace(rate=300.0))
    assert all(reply.sent >= reply.due for reply in run.replies)
    assert run.seconds >= 0.1


@pytest.mark.parametrize(
    ("first", "then", "sent"),
    [
        (Request(prompt="a", max_tokens=1), {"prompt": "b"}, {"prompt": "a<1>b"}),
        (Request(prompt=(1, 2), max_tokens=1), {"prompt": (3,)}, {"prompt": (1, 2, 7, 3)}),
        (
            Request(messages=({"role": "user", "content": "a"},), max_tokens=1),
            {"messages": ({"role": "user", "content": "b"},)},
            {
                "messages": (
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "<1>"},
                    {"role": "user", "content": "b"},
                )
            },
        ),
    ],
    ids=["text", "token ids", "chat"],
)
async def test_a_turn_continues_the_answer_after_a_pause(
    first: Request, then: dict[str, object], sent: dict[str, object]
) -> None:
    opening = msgspec.structs.replace(first, session="s")
    turn = Request(**then, max_tokens=1, session="s", think_s=0.05, continues=True)  # type: ignore[arg-type]
    run = await drive(Echo(), [opening, turn], Pace(rate=OWN_TIMES))
    assert {name: getattr(run.requests[1], name) for name in sent} == sent
    assert run.replies[1].sent >= run.replies[0].ended + 0.05


async def test_a_turn_is_not_sent_after_a_failed_answer() -> None:
    async def fails(request: Request, due: float | None = None) -> Reply:
        return Reply.unsent(perf_counter(), "down")

    turns = [Request(prompt="a", max_tokens=1, session="s", continues=n > 0) for n in range(2)]
    run = await drive(fails, turns, Pace())
    assert [reply.error for reply in run.replies] == ["down", "the request before it failed"]


async def test_the_deadline_ends_what_is_under_way_and_sends_no_more() -> None:
    echo = Echo(seconds=30.0)
    run = await drive(echo, alone(3), Pace(at_once=1, deadline_s=0.1))
    assert [reply.error.split(":")[0] for reply in run.replies] == [
        "given up",
        *["not sent within 0.1 s"] * 2,
    ]
    assert len(echo.sent) == 1 and echo.under_way == 0


async def test_more_warm_up_than_sessions_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 sessions, 2 of them warm-up"):
        await drive(Echo(), alone(2), Pace(warmup=2))


async def test_the_figures_are_those_of_vllm_s_definitions() -> None:
    """TPOT is per request and leaves the first token out; ITL is every gap, over all requests."""
    run = await drive(Echo(), alone(3), Pace(warmup=1))
    replies = (reply(1.0, 1.5, 2.5), reply(3.0), reply(error="lost"))
    run = type(run)(run.requests, replies, run.warmup, 4.0)
    summary = Summary.of(run, Goodput.parse(["ttft:1500", "tpot:800"]))
    fields = result(summary, Pace(at_once=2), target="t", model="m")
    expected = {
        "completed": 2, "failed": 1, "total_input_tokens": 20, "total_output_tokens": 4,
        "output_throughput": 1.0, "total_token_throughput": 6.0, "request_goodput": 0.25,
        "mean_ttft_ms": 2000.0, "p90_ttft_ms": 2800.0, "std_ttft_ms": 1000.0,
        "mean_tpot_ms": 750.0, "mean_itl_ms": 750.0, "median_e2el_ms": 2750.0,
        "max_output_tokens_per_s": 2.0, "max_concurrent_requests": 2, "request_rate": "inf",
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == pytest.approx(expected)
    assert [one["itls"] for one in details(run)] == [[0.5, 1.0], [], []]
    assert [one["error"] for one in details(run)] == ["", "", "lost"]


def test_requests_one_after_another_are_one_at_once() -> None:
    """Also within one second; one that ends as the next is sent is not beside it."""
    times = [(0.0, 0.2), (0.2, 0.5), (0.6, 0.9), (0.7, 0.8)]
    replies = tuple(msgspec.structs.replace(reply(end), sent=sent, due=sent) for sent, end in times)
    most = [
        Summary.of(Run(tuple(alone(count)), replies[:count], (), 1.0)).max_concurrent_requests
        for count in (2, 3, 4)
    ]
    assert most == [1, 1, 2]


def test_a_run_without_any_answer_makes_no_figure_look_good() -> None:
    """Its latencies are left out; a target that never answers has a line and no row."""

    def measured(*replies: Reply) -> Measured:
        requests = tuple(alone(len(replies)))
        run = Run(requests, replies, (), 4.0)
        return Measured(run, Summary.of(run), Agreement(), {"cores": 1})

    good, lost = measured(reply(1.0, 1.5)), measured(reply(error="lost"))
    point = Point(at_once=2, rate=CLOSED, requests=1)
    rounds = {"half": [lost, good], "none": [lost, lost], "whole": [good, good]}
    half, whole = rows_of(point, rounds)
    assert (half.target, half.ttft, half.failed) == ("half", whole.ttft, 1)
    assert half.cells()[0] == "half, 2 at once, INCOMPLETE" and half.cells()[-1] == "1 of 2"
    assert whole.cells()[0] == "whole, 2 at once" and whole.cells()[-1] == "0"
    assert failures(point, rounds) == [
        "half, 2 at once: 1 of 2 requests failed: lost",
        "none, 2 at once: 2 of 2 requests failed: lost",
    ]


@pytest.mark.parametrize("pair", ["ttft", "ttft:x", "ttft:-1", "ttft:nan", "itl:5", ""])
def test_wrong_objectives_are_named(pair: str) -> None:
    with pytest.raises(ValueError, match="is no objective: write ttft:MS"):
        Goodput.parse([pair])


def test_loads_are_files_of_lines(tmp_path: Path) -> None:
    load = [
        Request(prompt="a", max_tokens=3, session="s"),
        Request(prompt=(1, 2), max_tokens=3, arrival_s=1.5),
        Request(prompt="b", max_tokens=3, session="s", think_s=2.0, continues=True),
        Request(messages=({"role": "user", "content": "c"},), max_tokens=3, sampling={"seed": 1}),
    ]
    file = tmp_path / "load.jsonl"
    write_requests(file, load)
    assert read_requests(file) == load
    assert sessions_of(load) == [[0, 2], [1], [3]]


def test_a_trace_is_a_load_too(tmp_path: Path) -> None:
    """With its turns, times and tenants, and prompts that share what its records share."""
    file = tmp_path / "trace.jsonl"
    shared, new, other = (3, 20), (4, 12), (5, 9)
    write_trace(
        file,
        [
            Record(0, 32, 7, (0,), session_id=1, segments=(shared, new), cache_salt="a"),
            Record(
                2000, 29, 8, (1,), session_id=1, parent=0, think_time=500, segments=(shared, other)
            ),
        ],
    )
    first, turn = salted(load_of(ServingOptions(workload=str(file)), 9), "run 1")
    assert isinstance(first.prompt, tuple) and isinstance(turn.prompt, tuple)
    assert (len(first.prompt), len(turn.prompt)) == (32, 29)
    assert first.prompt[:20] == turn.prompt[:20] and max(first.prompt + turn.prompt) < 256
    assert (first.session, turn.session, turn.think_s) == ("1", "1", 0.5)
    assert (first.max_tokens, turn.max_tokens) == (7, 8)
    assert (first.sampling["cache_salt"], turn.sampling["cache_salt"]) == ("run 1 a", "run 1")


def test_a_load_with_prompts_takes_no_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    write_requests(file, alone(1))
    with pytest.raises(ConfigError, match="has its own prompts"):
        load_of(ServingOptions(workload=str(file), tokenizer=str(DEMO_MODEL)), 1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "truncated"),
        ('{"max_tokens": 1}', "give a prompt or messages"),
        ('{"prompt": "a", "max_tokens": 0}', ">= 1"),
        ('{"prompt": "a", "max_tokens": 1, "think_s": -1}', ">= 0"),
        ('{"prompt": "a", "max_tokens": 1, "continues": true}', "needs a session"),
    ],
)
def test_a_bad_line_is_named(line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text(f'{{"prompt": "a", "max_tokens": 1}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"load\.jsonl, line 3: .*{problem}.*README"):
        read_requests(file)


EXPECTED = Expected("abcd", (1, 2, 3), ("ab", "c", "d"), (1.0, 0.00005, 1.0))


@pytest.mark.parametrize(
    ("answer", "equal", "near_ties", "different"),
    [
        (reply(0.0, text="abcd", ids=(1, 2, 3)), 1, 0, ()),
        (reply(0.0, text="abxx", ids=(1, 9, 9)), 0, 1, ()),
        (reply(0.0, text="abcx", ids=(1, 2, 9)), 0, 0, ("request 0 at token 2, margin 1",)),
        (reply(0.0, text="abc", ids=(1, 2)), 0, 0, ("request 0 at token 2, margin 1",)),
        (reply(0.0, text="abcd"), 1, 0, ()),
        (reply(0.0, text="abxx"), 0, 1, ()),
        (reply(0.0, text="axcd"), 0, 0, ("request 0 at token 0, margin 1",)),
        (reply(0.0, text="abcde"), 0, 0, ("request 0 at token 3, margin unknown",)),
        (reply(error="lost"), 0, 0, ()),
    ],
)
def test_only_a_near_tie_excuses_a_difference(
    answer: Reply, equal: int, near_ties: int, different: tuple[str, ...]
) -> None:
    found = Agreement.of([EXPECTED], [answer])
    assert (found.equal, found.near_ties, found.different) == (equal, near_ties, different)
    assert found.holds == (not different)


IDS = (5, 6, 7)


class Alone(Client):
    """Answers 5, 6, 7 to all; the second token is a near-tie where the prompt begins with 0."""

    def __init__(self) -> None:
        super().__init__("http://alone", "tiny")
        self.sent: list[Request] = []

    async def send(self, request: Request, due: float | None = None) -> Reply:
        self.sent.append(request)
        gaps = (1.0, 1e-6 if request.prompt[0] == 0 else 1.0, 1.0)
        logprobs = {
            "tokens": ["a", "b", "c"],
            "top_logprobs": [{"a": -1.0, "b": -1.0 - gap} for gap in gaps],
        }
        return answer(*IDS, logprobs=(logprobs,))


def answer(*ids: int, logprobs: tuple[dict[str, object], ...] = (), error: str = "") -> Reply:
    return Reply(
        due=0.0, sent=0.0, ended=1.0, token_ids=ids, text="abc", logprobs=logprobs, error=error
    )


def run_of(*replies: Reply) -> Run:
    """Of conversations of two turns, as they were sent; the first of each begins with 0."""
    requests = [
        Request(prompt=(place % 2, 1), max_tokens=3, session="s", continues=place > 0)
        for place in range(len(replies))
    ]
    return Run(tuple(requests), replies, (), 1.0)


async def test_each_turn_is_asked_alone_with_its_whole_prompt() -> None:
    alone, run = Alone(), run_of(answer(*IDS), answer(5, 9, 9), answer(5, 9, 9), answer(error="x"))
    found = (await check_runs(alone, {"one": run}, ends_at=monotonic() + 60))["one"]
    assert (found.compared, found.equal, found.near_ties) == (3, 1, 1) and not found.holds
    assert [request.prompt for request in alone.sent] == [(0, 1), (1, 1)]  # the third is the first
    assert all(request.sampling["cache_salt"] == SALT for request in alone.sent)


async def test_no_more_is_asked_than_there_is_time_for() -> None:
    alone = Alone()
    runs = {"one": run_of(*[answer(*IDS)] * 4), "other": run_of(*[answer(*IDS)] * 2)}
    found = await check_runs(alone, runs, ends_at=monotonic() - 1)
    assert len(alone.sent) == 1 and all(one.compared and one.holds for one in found.values())


@pytest.mark.parametrize(
    ("theirs", "equal", "near_ties", "asked"),
    [
        ((answer(*IDS), answer(*IDS)), 2, 0, 0),
        ((answer(5, 9, 9), answer(*IDS)), 1, 1, 1),
        ((answer(*IDS), answer(5, 9, 9)), 1, 0, 1),
    ],
    ids=["equal", "near-tie", "different"],
)
async def test_a_node_alone_tells_which_of_two_clusters_is_wrong(
    theirs: tuple[Reply, ...], equal: int, near_ties: int, asked: int
) -> None:
    alone, runs = Alone(), {"one": run_of(answer(*IDS), answer(*IDS)), "other": run_of(*theirs)}
    found = await check_beside(alone, runs, ends_at=monotonic() + 60)
    assert (found["one"].compared, found["one"].equal) == (2, 2)
    assert (found["other"].equal, found["other"].near_ties) == (equal, near_ties)
    assert len(alone.sent) == asked


@pytest.mark.parametrize(
    ("agreement", "holds"),
    [
        (Agreement(2, 1, 1), True),
        (Agreement(2, 1, 0, ("request 1",)), False),
        (Agreement(lost=2, problem="down"), True),
    ],
    ids=["near-tie", "different", "no reference"],
)
def test_answers_that_differ_are_an_error(
    agreement: Agreement, holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tell(Console(), {"pair": agreement}) is holds
    said = capsys.readouterr()
    assert "pair: " in said.out and ("answers differ" in said.err) is not holds
    assert ("was compared; the reference failed 2 times: down" in said.out) is bool(agreement.lost)
