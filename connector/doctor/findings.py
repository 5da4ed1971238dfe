"""The doctor's findings: one line each, with a fix."""

from dataclasses import dataclass
from enum import Enum

from rich.text import Text

from engine.errors import TandemError


class Verdict(Enum):
    """The mark of a finding; only `WRONG` fails the check."""

    GOOD = "ok"
    NOTE = "note"
    WRONG = "WRONG"


STYLES = {Verdict.GOOD: "green", Verdict.NOTE: "yellow", Verdict.WRONG: "bold red"}


@dataclass(slots=True, frozen=True)
class Finding:
    """`subject`: the thing examined; `text`: the result; `fix`: advice, if there is any."""

    verdict: Verdict
    subject: str
    text: str
    fix: str = ""

    def line(self) -> Text:
        fix = f"; fix: {self.fix}" if self.fix else ""
        text = " ".join(f"{self.subject}: {self.text}{fix}".split())
        return Text.assemble((f"{self.verdict.value:<6}", STYLES[self.verdict]), text)


def good(subject: str, text: str) -> Finding:
    """A finding that needs no fix."""
    return Finding(Verdict.GOOD, subject, text)


def wrong(subject: str, text: str, fix: str) -> Finding:
    """A finding with which traffic would fail or go astray."""
    return Finding(Verdict.WRONG, subject, text, fix)


class DoctorError(TandemError):
    """A finding after which there is nothing more to ask."""

    def __init__(self, subject: str, text: str, fix: str) -> None:
        super().__init__(text)
        self.finding = wrong(subject, text, fix)
