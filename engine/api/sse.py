"""Server-sent events of one streaming request. Knows the order of chunks, not their shape."""

from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from msgspec import UNSET, UnsetType

from engine.api.choices import Delta
from engine.api.plan import Plan
from engine.api.replies import Usage
from engine.api.shape import Shape
from engine.api.tally import UsageTally
from engine.errors import TandemError
from engine.http.errors import reply_of

DONE = b"data: [DONE]\n\n"


def event(message: msgspec.Struct) -> bytes:
    """One `data:` line and the blank line that ends it."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


def error_event(error: TandemError) -> bytes:
    """The last line of a stream that failed: no [DONE] follows."""
    return event(reply_of(error))


async def events(
    shape: Shape, plan: Plan, deltas: AsyncIterator[Delta]
) -> AsyncGenerator[bytes, None]:
    """Chunks of all deltas, then usage if asked for, then [DONE]; raises what `deltas` raises."""
    tally = UsageTally(plan)
    opened: set[int] = set()
    async for delta in deltas:
        tally.add(delta)
        if _is_silent(plan, delta):
            continue
        usage = _chunk_usage(plan, tally)
        first = delta.index not in opened
        opened.add(delta.index)
        for chunk in shape.chunks(plan, delta, first=first, usage=usage):
            yield event(chunk)
    if plan.include_usage:
        yield event(shape.closing(plan, tally))
    yield DONE


def _is_silent(plan: Plan, delta: Delta) -> bool:
    """True for a step whose text is held back and that has nothing else to tell."""
    told = delta.text or delta.logprobs or delta.finish_reason
    return not (told or (plan.return_token_ids and delta.token_ids))


def _chunk_usage(plan: Plan, tally: UsageTally) -> Usage | UnsetType | None:
    """Null in every chunk once usage is asked for; vLLM's continuous_usage_stats fills it."""
    if plan.continuous_usage:
        return tally.usage()
    return None if plan.include_usage else UNSET
