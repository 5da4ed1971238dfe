"""The outcome of a soak: its rows, and the promises that were broken."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console

from benchmarks.robustness.soak import hostile
from benchmarks.robustness.soak.client import HANG_S, Answer, Verdict
from benchmarks.robustness.soak.watch import Watch

ALLOWED = (Verdict.EQUAL, Verdict.CANCELLED, Verdict.ERROR)


@dataclass(slots=True)
class Soak:
    """Everything that a run has seen.

    `kills` are moments (monotonic). `streams`: answers that the proxy continued on another decode
    node after their first token, and those that it ended with an error. `judged`: servers whose
    last life was long enough to be judged for leaks.
    """

    answers: list[Answer] = field(default_factory=list)
    strikes: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)
    kills: list[float] = field(default_factory=list)
    streams: Counter[str] = field(default_factory=Counter)
    judged: list[str] = field(default_factory=list)

    def broken(self) -> list[str]:
        """Every promise that was broken, in words."""
        verdicts = Counter(one.verdict for one in self.answers if one.verdict not in ALLOWED)
        found = [f"{number} answers: {verdict}" for verdict, number in verdicts.items()]
        if hung := sum(one.hung for one in self.answers):
            found.append(f"{hung} silences of more than {HANG_S:g} s")
        found += [
            f"hostile {act}: {how} ({number} times)"
            for (act, how), number in self.strikes.items()
            if hostile.is_bad(how)
        ]
        found += [
            f"{number} processes {how}"
            for how, number in self.ends.items()
            if how.startswith(("died", "SIGTERM"))
        ]
        return [*found, *self.left]

    def rows(self) -> list[list[str]]:
        """The table."""
        equal = [one.total_s for one in self.answers if one.verdict is Verdict.EQUAL]
        silences = [one.silence_s for one in self.answers]
        errors = [one for one in self.answers if one.verdict is Verdict.ERROR]
        rows = [["requests", f"{len(self.answers):,}"]]
        rows += [
            [f"... {verdict}", str(number)] for verdict, number in sorted(self._verdicts().items())
        ]
        kinds = Counter(one.kind for one in self.answers)
        rows += [["of each kind", ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))]]
        manners = Counter(one.manner for one in self.answers)
        rows += [["in each manner", ", ".join(f"{n} {it}" for it, n in sorted(manners.items()))]]
        rows += [["error rate", f"{len(errors) / max(1, len(self.answers)):.3f}"]]
        rows += [["errors after the first token", str(sum(bool(one.tokens) for one in errors))]]
        rows += [[f"broken streams {end}", str(n)] for end, n in sorted(self.streams.items())]
        rows += [[f"fault: {name}", str(number)] for name, number in sorted(self.ends.items())]
        rows += [["hostile requests", str(self.strikes.total())]]
        rows += _spread("seconds of equal answers", equal)
        rows += _spread("seconds from a kill to a good first token", list(self._recoveries()))
        rows += [["longest silence, s", f"{max(silences, default=0.0):.1f}"]]
        rows += [["judged for leaks", ", ".join(self.judged)]]
        rows += [["silences > 20 s", str(sum(one.hung for one in self.answers))]]
        return rows

    def _recoveries(self) -> Iterator[float]:
        """Per kill: until somebody who asked after it has a token that is right."""
        good = [one for one in self.answers if one.tokens and one.verdict in ALLOWED]
        for kill in self.kills:
            later = (one.first_at - kill for one in good if one.asked_at >= kill)
            if (soonest := min(later, default=None)) is not None:
                yield soonest

    def _verdicts(self) -> Counter[str]:
        return Counter(str(one.verdict) for one in self.answers)


def _spread(what: str, seconds: list[float]) -> list[list[str]]:
    if not seconds:
        return []
    ordered = sorted(seconds)
    return [
        [f"{what}, p50", f"{statistics.median(ordered):.2f}"],
        ["... p95", f"{ordered[math.ceil(0.95 * (len(ordered) - 1))]:.2f}"],
        ["... most", f"{ordered[-1]:.2f}"],
    ]


def explain(console: Console, soak: Soak) -> None:
    """Prints the causes of errors, and each broken promise."""
    causes = Counter(one.cause for one in soak.answers if one.verdict is Verdict.ERROR)
    for cause, number in causes.most_common():
        console.print(f"{number:6} x {cause}", style="dim", highlight=False)
    for (act, outcome), number in sorted(soak.strikes.items()):
        console.print(f"{number:6} x {act}: {outcome}", style="dim", highlight=False)
    for broken in soak.broken():
        console.print(f"BROKEN: {broken}", style="bold red", highlight=False)
    for one in soak.answers:
        if one.verdict not in ALLOWED or one.hung:
            with suppress(UnicodeEncodeError):
                console.print(f"  {one.manner}: {one.verdict}, {one.silence_s:.1f} s: {one.cause}")
