"""Log-probabilities as replies show them, in the shapes of both endpoints, and those of prompts."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from engine.types import PromptLogprobs, TokenId, TokenLogprob
from serving.api.choice_text import Delta, Detokenizer
from serving.api.plan import Plan
from serving.api.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprobReply,
    TopLogprob,
    finite,
)
from serving.api.tokenizer import Tokenizer


class LogprobFormat:
    """Names tokens by their text, or by their ids where the request asks for that."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def completion(self, plan: Plan, delta: Delta) -> CompletionLogprobs | None:
        """Four lists; an echoed prompt comes first, and nothing says what its first token costs.

        Offsets count characters from the start of the choice's text.
        """
        num_top, known = plan.requests[delta.index].sampling.logprobs, list(delta.logprobs)
        echoed = None if num_top is None or not plan.echo else delta.prompt_logprobs
        if not known and echoed is None:
            return None
        first: list[None] = []
        ids, offsets = [entry.token_id for entry in known], list(delta.text_offsets)
        if echoed is not None:
            known = [*_prompt_rows(echoed, num_top or 0), *known]
            prompt = plan.prompt_of(delta.index)
            first, ids = [None], [*prompt, *ids]
            offsets = [*self._offsets(prompt, plan.echo_of(delta.index)), *offsets]
        return CompletionLogprobs(
            tokens=[self._name(plan, token_id) for token_id in ids],
            token_logprobs=[*first, *(finite(entry.logprob) for entry in known)],
            top_logprobs=[*first, *(self._alternatives(plan, entry) for entry in known)],
            text_offset=offsets,
        )

    def chat(self, plan: Plan, delta: Delta) -> ChatLogprobs | None:
        """One object per token, with the exact bytes of each."""
        if not delta.logprobs:
            return None
        return ChatLogprobs(
            content=[
                ContentLogprob(
                    **self._token(plan, entry.token_id, entry.logprob),
                    top_logprobs=[TopLogprob(**self._token(plan, *pair)) for pair in entry.top],
                )
                for entry in delta.logprobs
            ]
        )

    def prompt(
        self, plan: Plan, found: PromptLogprobs | None
    ) -> list[dict[int, PromptLogprobReply] | None]:
        """An entry per token of the prompt: itself and its alternatives by id, in vLLM's shape."""
        num_top = plan.num_prompt_logprobs or 0
        rows = () if found is None else found.rows()
        return [None, *(self._of_prompt_token(row, rank, num_top) for row, rank in rows)]

    def _offsets(self, prompt: Sequence[TokenId], echo: str) -> Iterator[int]:
        """Where in `echo` the text of each token begins; parts of one character share a place."""
        detokenizer = Detokenizer(partial(self._tokenizer.decode, skip_special_tokens=False))
        offset = 0
        for token_id in prompt:
            yield offset
            piece = detokenizer.push(token_id)
            # A special token may have been put in front, and is in no text that was sent.
            if echo.startswith(piece, offset) or self._tokenizer.decode([token_id]):
                offset = min(offset + len(piece), len(echo))

    def _of_prompt_token(
        self, row: TokenLogprob, rank: int, num_top: int
    ) -> dict[int, PromptLogprobReply]:
        ranked = ((token_id, value, place) for place, (token_id, value) in enumerate(row.top, 1))
        entries = chain([(row.token_id, row.logprob, rank)], islice(ranked, num_top))
        found: dict[int, PromptLogprobReply] = {}
        for token_id, value, place in entries:
            text = self._tokenizer.token_text(token_id)
            reply = PromptLogprobReply(logprob=finite(value), rank=place, decoded_token=text)
            found.setdefault(token_id, reply)
        return found

    def _alternatives(self, plan: Plan, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives by name, best first; the token itself is always among them."""
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self._name(plan, token_id), finite(logprob))
        return found

    def _token(self, plan: Plan, token_id: TokenId, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(plan, token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _name(self, plan: Plan, token_id: TokenId) -> str:
        return (
            f"token_id:{token_id}" if plan.tokens_as_ids else self._tokenizer.token_text(token_id)
        )


def _prompt_rows(found: PromptLogprobs, num_top: int) -> Iterator[TokenLogprob]:
    for row, _ in found.rows():
        yield TokenLogprob(row.token_id, row.logprob, row.top[:num_top])
