"""The figures of a run, and their JSON: the fields of `vllm bench serve --save-result`, and more.

TTFT, TPOT, ITL and E2EL are at the client, in milliseconds. Percentiles interpolate linearly, as
numpy does. Failed requests have no times; they count as missing an objective.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Self

import msgspec
import numpy as np

from benchmarks.load.loop import OWN_TIMES, Pace, Run
from benchmarks.load.reply import Reply

PERCENTILES = (50.0, 90.0, 99.0)
OBJECTIVES = ("ttft", "tpot", "e2el")


class Times(msgspec.Struct, frozen=True):
    """One kind of time over a run, in milliseconds; all 0 if there is none.

    `percentiles`: by name, `p99` or `p99.9`.
    """

    mean: float
    std: float
    median: float
    p99: float
    percentiles: dict[str, float]

    @classmethod
    def of(cls, seconds: Sequence[float], ranks: Sequence[float] = PERCENTILES) -> Self:
        """From seconds; `ranks` of the percentiles, 0 to 100."""
        values = 1e3 * np.asarray(seconds if len(seconds) else [0.0])
        median, p99 = (float(np.percentile(values, rank)) for rank in (50, 99))
        asked = {f"p{rank:g}": float(np.percentile(values, rank)) for rank in ranks}
        return cls(float(values.mean()), float(values.std()), median, p99, asked)

    def fields(self, name: str) -> dict[str, float]:
        """As `vllm bench serve --metric-percentiles` names them."""
        return {
            f"mean_{name}_ms": self.mean,
            f"median_{name}_ms": self.median,
            f"std_{name}_ms": self.std,
            **{f"{rank}_{name}_ms": value for rank, value in self.percentiles.items()},
        }


class Goodput(msgspec.Struct, frozen=True):
    """Service level objectives in milliseconds; a request that meets all of them is good."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2el: float = math.inf

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> Self:
        """From `ttft:500`, `tpot:20`, `e2el:3000`; raises ValueError that names the wrong one."""
        limits = {}
        for pair in pairs:
            name, _, value = pair.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = math.nan
            if name not in OBJECTIVES or not limits[name] > 0:
                raise ValueError(f"{pair!r} is no objective: write ttft:MS, tpot:MS or e2el:MS")
        return cls(**limits)

    def show(self) -> str:
        """`ttft 500 ms, tpot 20 ms`."""
        limits = ((name, getattr(self, name)) for name in OBJECTIVES)
        told = [f"{name} {limit:g} ms" for name, limit in limits if limit < math.inf]
        return ", ".join(told) or "every answer"

    def is_good(self, reply: Reply) -> bool:
        """Whether `reply` came, and in time."""
        return not reply.error and all(
            1e3 * getattr(reply, name) <= getattr(self, name) for name in OBJECTIVES
        )


class Summary(msgspec.Struct, frozen=True):
    """The figures of one run; per second of its wall time.

    Hits and bytes pulled are None where no answer told of them; `told_tokens` are the prompt
    tokens of the answers that did.
    """

    seconds: float
    completed: int
    failed: int
    warmup_failed: int
    good: int
    input_tokens: int
    told_tokens: int
    cached_tokens: int | None
    decode_cached_tokens: int | None
    pulled_bytes: int | None
    output_tokens: int
    ttft: Times
    tpot: Times
    itl: Times
    e2el: Times
    late: Times
    warmup_ttft: Times
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    errors: tuple[str, ...]

    @classmethod
    def of(
        cls,
        run: Run,
        goodput: Goodput = Goodput(),  # noqa: B008  # frozen
        ranks: Sequence[float] = PERCENTILES,
    ) -> Self:
        """The figures of `run`. `late`: from when a request was due to when it was sent."""
        answered = [reply for reply in run.replies if not reply.error]
        warm = [reply for reply in run.warmup if not reply.error]
        tokens_per_s, concurrent = _peaks(answered)
        return cls(
            seconds=run.seconds,
            completed=len(answered),
            failed=len(run.replies) - len(answered),
            warmup_failed=len(run.warmup) - len(warm),
            good=sum(map(goodput.is_good, answered)),
            input_tokens=sum(reply.prompt_tokens for reply in answered),
            told_tokens=sum(it.prompt_tokens for it in answered if it.cached_tokens is not None),
            cached_tokens=total(reply.cached_tokens for reply in answered),
            decode_cached_tokens=total(it.transferred("decode_cached_tokens") for it in answered),
            pulled_bytes=total(map(pulled_bytes, answered)),
            output_tokens=sum(reply.output_tokens for reply in answered),
            ttft=Times.of([reply.ttft for reply in answered], ranks),
            tpot=Times.of([reply.tpot for reply in answered if reply.output_tokens > 1], ranks),
            itl=Times.of([gap for reply in answered for gap in reply.itls], ranks),
            e2el=Times.of([reply.e2el for reply in answered], ranks),
            late=Times.of([reply.sent - reply.due for reply in answered], ranks),
            warmup_ttft=Times.of([reply.ttft for reply in warm], ranks),
            max_output_tokens_per_s=tokens_per_s,
            max_concurrent_requests=concurrent,
            errors=tuple(reply.error for reply in (*run.warmup, *run.replies) if reply.error),
        )

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def hits(self) -> float | None:
        """Share of the prompt tokens that the prefill found in a cache; None if nobody told."""
        if self.cached_tokens is None:
            return None
        return self.cached_tokens / max(1, self.told_tokens)

    @property
    def decode_hits(self) -> float | None:
        """The share that the decode node had already; None if nobody told."""
        if self.decode_cached_tokens is None:
            return None
        return self.decode_cached_tokens / max(1, self.input_tokens)

    @property
    def tokens_per_s_per_user(self) -> float:
        """Output tokens per second that one reader sees after the first token: the mean TPOT's."""
        return 1e3 / self.tpot.mean if self.tpot.mean else 0.0

    def fields(self) -> dict[str, Any]:
        """The fields of `vllm bench serve`, then ours."""
        return {
            "duration": self.seconds,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.completed / self.seconds,
            "request_goodput": self.good / self.seconds,
            "output_throughput": self.output_throughput,
            "total_token_throughput": (self.input_tokens + self.output_tokens) / self.seconds,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
            **self.ttft.fields("ttft"),
            **self.tpot.fields("tpot"),
            **self.itl.fields("itl"),
            **self.e2el.fields("e2el"),
            "total_cached_tokens": self.cached_tokens,
            "total_decode_cached_tokens": self.decode_cached_tokens,
            "total_pulled_bytes": self.pulled_bytes,
            "tokens_per_s_per_user": self.tokens_per_s_per_user,
            "warmup_failed": self.warmup_failed,
            **self.warmup_ttft.fields("warmup_ttft"),
            **self.late.fields("late"),
        }


def result(summary: Summary, pace: Pace, *, target: str, model: str) -> dict[str, Any]:
    """One JSON object as `vllm bench serve --save-result` writes it, with our fields beside."""
    rate = {math.inf: "inf", OWN_TIMES: "own"}.get(pace.rate, pace.rate)
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": target,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": summary.completed + summary.failed,
        "request_rate": rate,
        "burstiness": pace.burstiness,
        "max_concurrency": pace.at_once,
        **summary.fields(),
    }


def details(run: Run) -> Iterator[dict[str, Any]]:
    """One record per request; seconds, of due and start since the first one was due."""
    begun = min(reply.due for reply in run.replies)
    for reply in run.replies:
        yield {
            "due": reply.due - begun,
            "start": reply.sent - begun,
            "ttft": reply.ttft if reply.chunks else None,
            "itls": reply.itls,
            "e2el": reply.e2el if reply.chunks else None,
            "prompt_tokens": reply.prompt_tokens,
            "cached_tokens": reply.cached_tokens,
            "output_tokens": reply.output_tokens,
            "kv_transfer": reply.usage.get("kv_transfer"),
            "finish_reason": reply.finish_reason,
            "error": reply.error,
        }


def total(told: Iterable[int | None]) -> int | None:
    """The sum of what some answers tell; None if none does."""
    known = [each for each in told if each is not None]
    return sum(known) if known else None


def pulled_bytes(reply: Reply) -> int | None:
    """Attention and states that the decode node pulled, if the server tells."""
    return total(map(reply.transferred, ("attention_bytes", "state_bytes")))


def _peaks(replies: Sequence[Reply]) -> tuple[float, int]:
    """The most chunks in one second, and the most requests under way at any moment."""
    if not replies:
        return 0.0, 0
    begun = min(reply.sent for reply in replies)
    seconds = int(max(reply.chunks[-1] for reply in replies) - begun) + 1
    chunks = np.zeros(seconds)
    for reply in replies:
        np.add.at(chunks, [int(time - begun) for time in reply.chunks], 1)
    # One that ends as another is sent is not under way beside it: -1 sorts before 1.
    sent, ended = ((reply.sent, 1) for reply in replies), ((r.chunks[-1], -1) for r in replies)
    steps = (step for _, step in sorted((*sent, *ended)))
    return float(chunks.max()), max(itertools.accumulate(steps))
