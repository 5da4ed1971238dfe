"""Greedy answers beside those of a reference: equal, turned at a near-tie, or different.

A near-tie is a token whose two best log-probabilities lie within a margin. Batches of other sizes
add in another order, and may turn it; what follows has another context and is not compared.

A run that is over can be checked too: one node computes its prompts alone, one at a time, under a
cache salt of its own. It finds nothing that the run left in its cache: a wrong pull, for one.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Self

import msgspec
import typer
from rich.console import Console

from benchmarks.load.client import Client
from benchmarks.load.loop import Pace, Run, drive
from benchmarks.load.reply import Reply
from benchmarks.load.request import Request, salted

# What float32 promises when the order of additions differs; the tests of nodes have the same.
MARGIN = 1e-4
MAX_NAMED = 5
SALT = "reference"
DIFFER = "error: answers differ, so that there is no table"


class Expected(msgspec.Struct, frozen=True):
    """The reference's answer: text, token ids if it sends them, each token's text and margin."""

    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    margins: tuple[float, ...]

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """From an answer to `with_margins(request)`."""
        tokens, margins = [], []
        for token, best in _tokens(reply):
            tokens.append(token)
            first, second = (*sorted(best, reverse=True), -float("inf"), -float("inf"))[:2]
            margins.append(first - second)
        return cls(reply.text, reply.token_ids, tuple(tokens), tuple(margins))

    def first_difference(self, reply: Reply) -> int | None:
        """The first token that differs; None if none does."""
        if self.token_ids and reply.token_ids:
            pairs = itertools.zip_longest(self.token_ids, reply.token_ids)
            return next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if self.text == reply.text:
            return None
        characters = itertools.zip_longest(self.text, reply.text)
        differs = next(place for place, (a, b) in enumerate(characters) if a != b)
        ends = itertools.accumulate(map(len, self.tokens))
        return next((place for place, end in enumerate(ends) if end > differs), len(self.tokens))


class Agreement(msgspec.Struct, frozen=True):
    """How many answers were compared and how they compare; `different` says where."""

    compared: int = 0
    equal: int = 0
    near_ties: int = 0
    different: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, expected: Sequence[Expected], replies: Sequence[Reply], *, margin: float = MARGIN
    ) -> Self:
        """Failed requests have no answer to compare: they stand among the failed ones."""
        equal, near_ties, different = 0, 0, []
        for number, (one, reply) in enumerate(zip(expected, replies, strict=True)):
            if reply.error:
                continue
            place = one.first_difference(reply)
            if place is None:
                equal += 1
            elif place < len(one.margins) and one.margins[place] <= margin:
                near_ties += 1
            else:
                gap = f"{one.margins[place]:.2g}" if place < len(one.margins) else "unknown"
                different.append(f"request {number} at token {place}, margin {gap}")
        compared = equal + near_ties + len(different)
        return cls(compared, equal, near_ties, tuple(different))

    def plus(self, other: Self) -> Self:
        """Both together."""
        return type(self)(
            self.compared + other.compared,
            self.equal + other.equal,
            self.near_ties + other.near_ties,
            (*self.different, *other.different),
        )

    @property
    def holds(self) -> bool:
        """Whether something was compared, and only near-ties told it apart."""
        return self.compared > 0 and not self.different

    def show(self) -> str:
        """`412 of 412 greedy answers equal, 2 of them up to a near-tie`."""
        alike = self.equal + self.near_ties
        named = "; ".join(self.different[:MAX_NAMED])
        return (
            f"{alike} of {self.compared} greedy answers equal, {self.near_ties} of them up to a "
            f"near-tie{f'; different: {named}' if named else ''}"
        )


def with_margins(request: Request) -> Request:
    """The same request with the best log-probabilities of each token."""
    # More than two, as servers that name tokens by their texts merge those with equal ones.
    asked = {"logprobs": True, "top_logprobs": 5} if request.messages else {"logprobs": 5}
    return msgspec.structs.replace(request, sampling={**request.sampling, **asked})


class Reference:
    """Answers of one server that is asked one request at a time."""

    def __init__(self) -> None:
        """Knows no answer yet."""
        self._answers: dict[bytes, Expected] = {}

    async def ask(
        self, client: Client, requests: Sequence[Request], done: Callable[[], None] | None = None
    ) -> None:
        """Sends all of `requests` that are greedy; raises RuntimeError if one fails."""

        async def send(request: Request, due: float | None = None) -> Reply:
            return await client.send(with_margins(request), due)

        run = await drive(send, requests, Pace(at_once=1), done=done)
        for request, reply in zip(run.requests, run.replies, strict=True):
            if reply.error:
                raise RuntimeError(f"the reference {client.url} fails: {reply.error}")
            if request.sampling.get("temperature") == 0:
                self._answers[_key(request)] = Expected.of(reply)

    def judge(self, run: Run, margin: float = MARGIN) -> Agreement:
        """All that was asked of both. A turn whose conversation went another way was not."""
        pairs = [
            (self._answers[key], reply)
            for request, reply in zip(run.requests, run.replies, strict=True)
            if (key := _key(request)) in self._answers
        ]
        return Agreement.of([one for one, _ in pairs], [reply for _, reply in pairs], margin=margin)


async def check_run(
    alone: Client, run: Run, *, ends_at: float, done: Callable[[], None] | None = None
) -> Agreement:
    """The answers of `run` that can be asked again before `ends_at` (monotonic); one at least.

    Raises RuntimeError if `alone` fails.
    """
    reference = Reference()
    pairs = zip(run.requests, run.replies, strict=True)
    answered = [request for request, reply in pairs if not reply.error]
    for number, request in enumerate(_as_sent(answered)):
        if number and monotonic() > ends_at:
            break
        await reference.ask(alone, [request], done)
    return reference.judge(run)


async def check_beside(alone: Client, runs: Mapping[str, Run]) -> dict[str, Agreement]:
    """Runs of equal requests beside each other; where they differ, `alone` tells which is right.

    Raises RuntimeError if `alone` fails.
    """
    first, *others = runs.values()
    differ = [
        request
        for place, request in enumerate(first.requests)
        if any(other.replies[place].token_ids != first.replies[place].token_ids for other in others)
    ]
    equal = len(first.requests) - len(differ)
    same = Agreement(compared=equal, equal=equal)
    if not differ:
        return dict.fromkeys(runs, same)
    reference = Reference()
    await reference.ask(alone, _as_sent(differ))
    return {name: same.plus(reference.judge(run)) for name, run in runs.items()}


def tell(console: Console, agreements: Mapping[str, Agreement]) -> bool:
    """Prints how answers compare; False, with an error, if some differ or none was compared."""
    holds = all(agreement.holds for agreement in agreements.values())
    for name, agreement in agreements.items():
        console.print(f"{name}: {agreement.show()}", style=None if holds else "bold red")
    if not holds:
        typer.echo(DIFFER, err=True)
    return holds


def _key(request: Request) -> bytes:
    return msgspec.json.encode((request.prompt, request.messages, request.max_tokens))


def _tokens(reply: Reply) -> list[tuple[str, list[float]]]:
    """Each token and the log-probabilities of the best ones, of completions and of chats."""
    pairs: list[tuple[str, list[float]]] = []
    for part in reply.logprobs:
        pairs += [
            (entry["token"], [best["logprob"] for best in entry["top_logprobs"]])
            for entry in part.get("content") or ()
        ]
        tops: Sequence[dict[str, Any] | None] = part.get("top_logprobs") or ()
        for token, top in zip(part.get("tokens") or (), tops, strict=True):
            pairs.append((token, list((top or {}).values())))
    return pairs


def _as_sent(requests: Sequence[Request]) -> list[Request]:
    """Whole prompts, as runs note them, each by itself."""
    return [
        msgspec.structs.replace(one, session="", continues=False, think_s=0.0, arrival_s=0.0)
        for one in salted(requests, SALT)
    ]
