"""The reply to one request: its times, its tokens, its text, or its error."""

import itertools
from typing import Any, Self

import msgspec


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One answer; times are of `perf_counter`, in seconds.

    `due` is when it had to be sent, `sent` when it was. `chunks` are the times of events that
    brought a token or text; `token_ids` is empty where the server does not send them. `usage` and
    `logprobs` are as the server wrote them, of all events. `error` is empty if all is well.
    """

    due: float
    sent: float
    ended: float
    chunks: tuple[float, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    usage: dict[str, Any] = msgspec.field(default_factory=dict)
    logprobs: tuple[dict[str, Any], ...] = ()
    error: str = ""

    @classmethod
    def unsent(cls, now: float, error: str) -> Self:
        """A request that was never sent."""
        return cls(due=now, sent=now, ended=now, error=error)

    @property
    def prompt_tokens(self) -> int:
        """As the server counts them."""
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the prefill found in a cache; None if the server does not tell."""
        told = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return self.transferred("prefill_cached_tokens") if told is None else int(told)

    def transferred(self, name: str) -> int | None:
        """A count of `usage.kv_transfer`; None if the server does not tell."""
        told = (self.usage.get("kv_transfer") or {}).get(name)
        return None if told is None else int(told)

    @property
    def output_tokens(self) -> int:
        """As the server counts them."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.chunks[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last token."""
        return self.chunks[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return (self.chunks[-1] - self.chunks[0]) / max(1, self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between each two chunks."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks)]
