"""The options of `python -m benchmarks.serving`: one flag per field, named as vLLM's bench does."""

from typing import Annotated

from msgspec import Meta

from benchmarks.load.agreement import MARGIN
from benchmarks.load.loop import OWN_TIMES
from benchmarks.load.summary import Goodput
from benchmarks.support.report import RESULTS
from engine.errors import ConfigError
from serving.config import Config

CONCURRENCY, QUICK_CONCURRENCY = (1, 4, 16), (2,)
OWN_RATES = (4.0,)
OWN_OBJECTIVES = ("ttft:500", "tpot:20")
QUICK_REQUESTS = 4

_Count = Annotated[int, Meta(ge=1)]


class ServingOptions(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one measurement: the targets and their load."""

    target: Annotated[
        tuple[str, ...],
        Meta(
            description="An OpenAI-compatible base URL, or NAME=URL; again for each further one. "
            "Without any, Tandem's own servers are started: P, D and proxy, and beside them one "
            "node alone."
        ),
    ] = ()
    reference: Annotated[
        str, Meta(description="The base URL that greedy answers must equal. Default: the last one.")
    ] = ""
    pid: Annotated[
        tuple[str, ...],
        Meta(
            description="NAME=PID: this process of a target and its children stand still while "
            "other targets are asked; for servers that poll when idle."
        ),
    ] = ()
    model: Annotated[
        str,
        Meta(
            description="The served name; without --target a model folder. Default: the first "
            "served one, or the demo's."
        ),
    ] = ""
    api_key: Annotated[
        str, Meta(description="Of all targets.", extra={"envvar": "OPENAI_API_KEY"})
    ] = "none"
    cores: Annotated[
        int, Meta(ge=0, description="Cores of each target, for the rates per core; 0 for all.")
    ] = 0
    workload: Annotated[
        str,
        Meta(
            description="A load as JSON lines: requests (benchmarks/load/request.py), or records "
            "of a trace as benchmarks.workloads and Mooncake write them, at their whole lengths."
        ),
    ] = ""
    tokenizer: Annotated[
        str,
        Meta(
            description="A folder with a tokenizer.json: prompts are random ids of it. Without, "
            "they are the demo model's kind of text, or a trace's are ids below 256."
        ),
    ] = ""
    random_prefix_len: Annotated[
        int, Meta(ge=0, description="Tokens that all random prompts begin with.")
    ] = 0
    random_input_len: Annotated[
        int, Meta(ge=1, description="Tokens of a random prompt after that.")
    ] = 512
    output_len: Annotated[int, Meta(ge=1, description="Tokens of each answer.")] = 64
    concurrency: Annotated[
        tuple[_Count, ...], Meta(description="Users at once, a closed loop; may be repeated.")
    ] = ()
    rate: Annotated[
        tuple[Annotated[float, Meta(ge=0.0)], ...],
        Meta(description="Requests per second, an open loop, 0 for the load's own times."),
    ] = ()
    burstiness: Annotated[
        float, Meta(gt=0.0, description="Of open loops: 1 is Poisson, less comes in bursts.")
    ] = 1.0
    requests: Annotated[
        int, Meta(ge=0, description="Of each run; 0 for 4 per user, or 10 seconds of a rate.")
    ] = 0
    warmup: Annotated[
        int, Meta(ge=0, description="Requests before each run, which are told apart.")
    ] = 4
    goodput: Annotated[
        tuple[str, ...], Meta(description="Objectives in ms: ttft:500, tpot:20, e2el:3000.")
    ] = ()
    margin: Annotated[
        float, Meta(ge=0.0, description="Greedy tokens closer than this are near-ties.")
    ] = MARGIN
    rounds: Annotated[
        int, Meta(ge=1, description="Rounds that count, after one that does not.")
    ] = 5
    minutes: Annotated[
        float, Meta(gt=0.0, description="At most; rounds that hardly fit are left out.")
    ] = 6.0
    quick: Annotated[
        bool, Meta(description="Small and short: shows that it runs, measures little.")
    ] = False
    out: Annotated[str, Meta(description="The folder for its JSON and plot.")] = str(RESULTS)

    def check(self) -> None:
        """Raises ConfigError for objectives and loads that cannot be."""
        try:
            self.objectives()
        except ValueError as error:
            raise ConfigError(f"--goodput {error}") from error
        if self.reference and not self.target:
            raise ConfigError("--reference is for --target; own servers have a node alone")
        if OWN_TIMES in self.rate and not self.workload:
            raise ConfigError("--rate 0 needs a --workload with times")

    def objectives(self) -> Goodput:
        """The objectives given; own servers have some by default."""
        return Goodput.parse(self.goodput or (() if self.target else OWN_OBJECTIVES))

    def concurrencies(self) -> tuple[int, ...]:
        """Concurrencies of closed loops: those given; some by default, unless there are rates."""
        if self.concurrency or (self.rate and not self.quick):
            return self.concurrency
        return QUICK_CONCURRENCY if self.quick else CONCURRENCY

    def rates(self) -> tuple[float, ...]:
        """Rates of the open loops: those given; one by default for own servers."""
        return self.rate or (() if self.target else OWN_RATES)
