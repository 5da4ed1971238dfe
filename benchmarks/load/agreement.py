"""Greedy answers beside those of a reference: equal, turned at a near-tie, or different.

A near-tie is a token whose two best log-probabilities lie within a margin. Batches of other sizes
add in another order, and may turn it; what follows has another context and is not compared.

A run that is over can be checked too: one node computes its prompts alone, one at a time, under a
cache salt of its own. It finds nothing that the run left in its cache: a wrong pull, for one.
"""

import itertools
import secrets
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
# Another run's reference may have left the same prompts in the cache of the same server.
SALT = f"reference {secrets.token_hex(4)}"
# Even where the time is over, one answer is compared.
LEAST_S = 5.0
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
    """How many answers were compared and how they compare; `different` says where.

    `lost`: answers that could not be compared, as the reference failed; `problem`: its first error.
    """

    compared: int = 0
    equal: int = 0
    near_ties: int = 0
    different: tuple[str, ...] = ()
    lost: int = 0
    problem: str = ""

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
            self.lost + other.lost,
            self.problem or other.problem,
        )

    @property
    def holds(self) -> bool:
        """Whether only near-ties told apart what was compared, if anything was."""
        return not self.different

    def show(self) -> str:
        """`412 of 412 greedy answers equal, 2 of them up to a near-tie`."""
        alike = self.equal + self.near_ties
        said = [
            f"{alike} of {self.compared} greedy answers equal, {self.near_ties} of them up to a "
            "near-tie"
            if self.compared
            else "no greedy answer was compared"
        ]
        if self.different:
            said.append(f"different: {'; '.join(self.different[:MAX_NAMED])}")
        if self.lost:
            said.append(f"the reference failed {self.lost} times: {self.problem}")
        return "; ".join(said)


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
        self._errors: dict[bytes, str] = {}

    async def ask(
        self,
        client: Client,
        requests: Sequence[Request],
        done: Callable[[], None] | None = None,
        *,
        ends_at: float,
    ) -> None:
        """Sends all of `requests` if some are greedy; gives up at `ends_at` (monotonic).

        An answer that does not come in time, or at all, is one that nothing is compared with.
        """
        if not any(map(_is_greedy, requests)):
            return

        async def send(request: Request, due: float | None = None) -> Reply:
            return await client.send(with_margins(request), due)

        pace = Pace(at_once=1, deadline_s=max(LEAST_S, ends_at - monotonic()))
        run = await drive(send, requests, pace, done=done)
        for request, reply in zip(run.requests, run.replies, strict=True):
            if reply.error:
                self._errors[_key(request)] = f"{client.url}: {reply.error}"
            elif _is_greedy(request):
                self._answers[_key(request)] = Expected.of(reply)

    def judge(self, run: Run, margin: float = MARGIN) -> Agreement:
        """All that was asked of both. A turn whose conversation went another way was not."""
        answered = [
            (_key(request), reply)
            for request, reply in zip(run.requests, run.replies, strict=True)
            if _is_greedy(request) and not reply.error
        ]
        pairs = [(self._answers[key], reply) for key, reply in answered if key in self._answers]
        errors = [self._errors[key] for key, _ in answered if key in self._errors]
        found = Agreement.of(
            [one for one, _ in pairs], [reply for _, reply in pairs], margin=margin
        )
        return found.plus(Agreement(lost=len(errors), problem=next(iter(errors), "")))


async def check_runs(
    alone: Client,
    runs: Mapping[str, Run],
    *,
    ends_at: float,
    done: Callable[[], None] | None = None,
) -> dict[str, Agreement]:
    """Of all answers that can be asked again before `ends_at` (monotonic); one at least."""
    reference = Reference()
    answered = [
        _as_sent(
            [it for it, reply in zip(run.requests, run.replies, strict=True) if not reply.error]
        )
        for run in runs.values()
    ]
    # Place by place, so that every run is checked as far as the time goes. Equal ones are one.
    asked = {_key(it): it for together in itertools.zip_longest(*answered) for it in together if it}
    for number, request in enumerate(asked.values()):
        if number and monotonic() > ends_at:
            break
        await reference.ask(alone, [request], done, ends_at=ends_at)
    return {name: reference.judge(run) for name, run in runs.items()}


async def check_beside(
    alone: Client, runs: Mapping[str, Run], *, ends_at: float
) -> dict[str, Agreement]:
    """Runs of equal requests beside each other; where they differ, `alone` tells which is right."""
    first, *others = runs.values()
    differ = [
        request
        for place, request in enumerate(first.requests)
        if any(other.replies[place].token_ids != first.replies[place].token_ids for other in others)
    ]
    # What failed everywhere has no tokens, and nothing to compare.
    lost = sum(
        all(run.replies[at].error for run in runs.values()) for at in range(len(first.replies))
    )
    equal = len(first.requests) - len(differ) - lost
    same = Agreement(compared=equal, equal=equal)
    if not differ:
        return dict.fromkeys(runs, same)
    reference = Reference()
    await reference.ask(alone, _as_sent(differ), ends_at=ends_at)
    return {name: same.plus(reference.judge(run)) for name, run in runs.items()}


def tell(console: Console, agreements: Mapping[str, Agreement]) -> bool:
    """Prints how answers compare; False, with an error, if some differ."""
    holds = all(agreement.holds for agreement in agreements.values())
    for name, agreement in agreements.items():
        is_whole = agreement.holds and agreement.compared and not agreement.lost
        console.print(f"{name}: {agreement.show()}", style=None if is_whole else "bold red")
    if not holds:
        typer.echo(DIFFER, err=True)
    return holds


def _is_greedy(request: Request) -> bool:
    return request.sampling.get("temperature") == 0


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
