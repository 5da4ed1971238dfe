"""What the doctor says: one line per finding, and what to do about it."""

from dataclasses import dataclass
from enum import Enum

from rich.text import Text


class Verdict(Enum):
    """How a finding is marked; only `WRONG` fails the check."""

    GOOD = "ok"
    NOTE = "note"
    WRONG = "WRONG"


STYLES = {Verdict.GOOD: "green", Verdict.NOTE: "yellow", Verdict.WRONG: "bold red"}


@dataclass(slots=True, frozen=True)
class Finding:
    """`subject`: what was looked at; `text`: what was found; `fix`: what to do, if anything."""

    verdict: Verdict
    subject: str
    text: str
    fix: str = ""

    def line(self) -> Text:
        """The finding as one line of a terminal."""
        fix = f"; fix: {self.fix}" if self.fix else ""
        text = " ".join(f"{self.subject}: {self.text}{fix}".split())
        return Text.assemble((f"{self.verdict.value:<6}", STYLES[self.verdict]), text)


def good(subject: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(Verdict.GOOD, subject, text)


def wrong(subject: str, text: str, fix: str) -> Finding:
    """Traffic would fail, or not do what it should."""
    return Finding(Verdict.WRONG, subject, text, fix)
