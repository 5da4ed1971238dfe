"""The log of requests: one line at the end of each, and one of throughput while there is work.

Lines name requests, nodes and counts. No prompt, no answer and no token is in them.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from engine.errors import OverloadedError
from serving.telemetry.request_records import RecordReader, RequestRecord, RequestRecords, Visit

THROUGHPUT_EVERY_S: Final = 10.0

log = structlog.get_logger()


class RequestLog(RecordReader):
    """A line per request. A flood of refused ones is not logged: metrics count them."""

    def ended(self, record: RequestRecord) -> None:
        if record.outcome == OverloadedError.__name__:
            return
        origin = record.request.origin
        log.info(
            "request ended",
            request_id=record.request.request_id,
            **_given(x_request_id=origin.label, key=origin.key),
            outcome=record.outcome,
            prompt_tokens=record.num_prompt_tokens,
            cached_tokens=record.num_cached_tokens,
            tokens=record.num_tokens,
            ttft_ms=_ms(record.first_output),
            e2e_ms=_ms(record.ended),
            **_transfer(record),
            **({"visits": [_visit(visit) for visit in record.visits]} if record.visits else {}),
        )


async def log_throughput(
    records: RequestRecords,
    load: Callable[[], Mapping[str, object]],
    *,
    every_s: float = THROUGHPUT_EVERY_S,
) -> None:
    """Logs tokens per second and `load` every `every_s` seconds, unless nothing happens."""
    before = records.tokens_so_far()
    while True:
        await asyncio.sleep(every_s)
        now = records.tokens_so_far()
        if now != before or records.open:
            log.info(
                "throughput",
                prompt_tokens_per_s=round((now[0] - before[0]) / every_s, 1),
                tokens_per_s=round((now[1] - before[1]) / every_s, 1),
                num_requests=len(records.open),
                **load(),
            )
        before = now


def _visit(visit: Visit) -> str:
    took = "" if visit.ended is None else f" {1e3 * (visit.ended - visit.began):.1f} ms"
    return f"{visit.kind} {visit.node} {visit.outcome}{took}"


def _transfer(record: RequestRecord) -> dict[str, object]:
    moved = record.kv_transfer
    if moved is None:
        return {}
    return {
        "kv_transfer_bytes": moved.attention_bytes + moved.state_bytes,
        "kv_transfer_ms": round(moved.transfer_ms, 3),
        **_given(kv_transfer_cause=moved.cause),
    }


def _given(**words: str) -> dict[str, str]:
    return {name: word for name, word in words.items() if word}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
