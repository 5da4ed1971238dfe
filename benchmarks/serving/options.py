"""Options of the serving benchmarks: one flag per field, named as vLLM's bench does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from benchmarks.load.agreement import MARGIN
from benchmarks.load.loop import OWN_TIMES
from benchmarks.load.summary import PERCENTILES, Goodput
from benchmarks.support.report import RESULTS
from engine.errors import ConfigError
from serving.config import Config

CONCURRENCY, QUICK_CONCURRENCY = (1, 4, 16), (2,)
OWN_RATES = (4.0,)
OWN_OBJECTIVES = ("ttft:500", "tpot:20")
QUICK_REQUESTS = 4

_Count = Annotated[int, Meta(ge=1)]


class TargetOptions(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is asked and how, and which files are written, in every serving benchmark."""

    target: Annotated[
        tuple[str, ...],
        Meta(
            description="An OpenAI-compatible base URL, or NAME=URL; again for each further one, "
            "which are asked in turn. Without any, Tandem's own servers are started."
        ),
    ] = ()
    reference: Annotated[
        str, Meta(description="The base URL that greedy answers must equal. Default: the last one.")
    ] = ""
    model: Annotated[
        str, Meta(description="The served name of all targets. Default: the first that each has.")
    ] = ""
    api_key: Annotated[
        str, Meta(description="Of all targets.", extra={"envvar": "OPENAI_API_KEY"})
    ] = "none"
    header: Annotated[
        tuple[str, ...], Meta(description="NAME=VALUE of every request; may be repeated.")
    ] = ()
    temperature: Annotated[
        Annotated[float, Meta(ge=0.0)] | None,
        Meta(description="Of every request. Above 0 no answers are compared. Default: greedy."),
    ] = None
    extra_body: Annotated[
        str, Meta(description="A JSON object whose keys go into the body of every request.")
    ] = ""
    tokenizer: Annotated[
        str,
        Meta(
            description="A folder with a tokenizer.json: random prompts are ids of it. Without, "
            "they are ids below 256, or text of the demo model's kind."
        ),
    ] = ""
    percentiles: Annotated[
        str,
        Meta(
            description="As 50,95,99.9: a table of them, and in the JSON instead of 50,90,99. Of "
            "TTFT, TPOT, ITL and E2EL."
        ),
    ] = ""
    save_detailed: Annotated[
        str, Meta(description="A file for one JSON record per request; seconds.")
    ] = ""
    plot_timeline: Annotated[
        str,
        Meta(description="A PNG of the last round: who waits, prefills and decodes when."),
    ] = ""
    minutes: Annotated[
        float, Meta(gt=0.0, description="At most; what hardly fits is left out.")
    ] = 8.0
    quick: Annotated[
        bool, Meta(description="Small and short: shows that it runs, measures little.")
    ] = False
    out: Annotated[str, Meta(description="The folder for its JSON and plot.")] = str(RESULTS)

    def check(self) -> None:
        """Raises ConfigError for what no request can have, and files that cannot be written."""
        self.sampling()
        self.headers()
        self.ranks()
        if self.reference and not self.target:
            raise ConfigError("--reference is for --target; own servers have a node alone")
        for name in ("save_detailed", "plot_timeline"):
            file = getattr(self, name)
            if file and not Path(file).parent.is_dir():
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} {file}: {Path(file).parent} is not a folder")

    def sampling(self) -> dict[str, Any]:
        """Keys of every request's body, which win over its own; raises ConfigError."""
        given = {} if self.temperature is None else {"temperature": self.temperature}
        if not self.extra_body:
            return given
        try:
            return {**given, **msgspec.json.decode(self.extra_body, type=dict[str, Any])}
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ConfigError(
                f"--extra-body must be a JSON object: {error}; got {self.extra_body!r}"
            ) from error

    def headers(self) -> dict[str, str]:
        """By name; raises ConfigError."""
        pairs = [one.partition("=") for one in self.header]
        for given, (name, is_there, _) in zip(self.header, pairs, strict=True):
            if not (name.strip() and is_there):
                raise ConfigError(f"--header {given!r}: write NAME=VALUE")
        return {name.strip(): value for name, _, value in pairs}

    def ranks(self) -> Sequence[float]:
        """The percentiles asked for, or those that every JSON has; raises ConfigError."""
        try:
            ranks = [float(rank) for rank in self.percentiles.split(",") if self.percentiles]
        except ValueError:
            ranks = [-1.0]
        if not all(0.0 <= rank <= 100.0 for rank in ranks):
            raise ConfigError(
                f"--percentiles {self.percentiles}: write numbers up to 100, as 50,99"
            )
        return ranks or PERCENTILES

    def without_secrets(self) -> Self:
        """As files may tell of it."""
        return msgspec.structs.replace(self, api_key="", header=tuple(self.headers()))


class ServingOptions(TargetOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `python -m benchmarks.serving`: the load and its rounds."""

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
    cores: Annotated[
        int, Meta(ge=0, description="Cores of each target, for the rates per core; 0 for all.")
    ] = 0
    workload: Annotated[
        str,
        Meta(
            description="A file of requests, of ShareGPT's conversations, or of a trace as "
            "Mooncake and Azure write them, at their whole lengths; benchmarks/README.md has more."
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

    def check(self) -> None:
        """Raises ConfigError for objectives and loads that cannot be."""
        super().check()
        try:
            self.objectives()
        except ValueError as error:
            raise ConfigError(f"--goodput {error}") from error
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
