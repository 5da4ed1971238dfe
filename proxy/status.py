"""The state of the cluster, as the page at / shows it: a page without secrets, a JSON behind a key.

Nothing is counted for it: it costs something only while somebody looks.
"""

import base64
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.cluster.node import Node, NodeKind
from proxy.cluster.node_pool import NodePool
from proxy.metrics import ProxyMetrics
from proxy.warming import Warming
from serving.http.callers import require_operator
from serving.kv_events.follower import SourceStats
from serving.telemetry.request_records import RequestRecord, RequestRecords, Visit

PAGE: Final = Path(__file__).with_name("status_page.html")
MAX_LISTED: Final = 60
RECENT_S: Final = 60.0
"""A request that failed so lately makes the cluster look degraded."""


class ClusterStatus:
    """Routes of the page and of its JSON. `event_stats`: by node, of nodes that publish events."""

    def __init__(
        self,
        pool: NodePool,
        warming: Warming,
        *,
        records: RequestRecords,
        metrics: ProxyMetrics,
        event_stats: Callable[[], Mapping[str, SourceStats]],
        num_waiting: Callable[[], int],
    ) -> None:
        self._pool = pool
        self._warming = warming
        self._records = records
        self._metrics = metrics
        self._event_stats = event_stats
        self._num_waiting = num_waiting
        self._started = time.time()
        self._page = PAGE.read_bytes()
        self._headers = _headers_for(self._page.decode())
        # The page itself holds no secret and needs no key. The status is for operators: requests
        # of all clients are in it.
        self.page_route = Route("/", self._show_page)
        self.status_route = Route("/status", self._show_status)

    async def _show_page(self, request: Request) -> Response:
        return Response(self._page, headers=self._headers, media_type="text/html")

    async def _show_status(self, request: Request) -> Response:
        require_operator(request.scope)
        body = msgspec.json.encode(self.snapshot())
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(body, headers=headers, media_type="application/json")

    def snapshot(self) -> dict[str, Any]:
        """Bounded by the nodes of the options and by `MAX_LISTED` requests."""
        records, now = self._records, time.time()
        stats = self._event_stats()
        nodes = [self._node(node, stats.get(node.name)) for node in self._pool.nodes]
        # Those under way come last, so the newest of them are shown first.
        last = [*records.recent, *list(records.open.values())[-MAX_LISTED:]]
        return {
            "now": now,
            "uptime_s": now - self._started,
            "model": self._metrics.model_name,
            **self._health(now),
            "num_open": len(records.open),
            "num_waiting": self._num_waiting(),
            "totals": {
                "requests": records.num_ended,
                "failed": records.num_failed,
                "prompt_tokens": records.num_prompt_tokens,
                "cached_tokens": records.num_cached_tokens,
                # Of requests under way too, so that long answers move the rate.
                "tokens": records.tokens_so_far()[1],
            },
            "nodes": nodes,
            "requests": [_request(it) for it in reversed(last[-MAX_LISTED:])],
        }

    def _health(self, now: float) -> dict[str, Any]:
        """`healthy`, `degraded` or `down`, and why, in words; the worst first."""
        away = [
            f"{it.kind} node {it.name}: {problem}"
            for it in self._pool.nodes
            if (problem := it.problem or self._warming.problem_of(it))
        ]
        failing = [
            f"hand-overs from {problem.address or problem.engine_id} to {node.name} fail: "
            f"{problem.cause} ({problem.count} in a row)"
            for node in self._pool.nodes
            if node.is_available
            for problem in node.info.hand_over_problems
        ]
        late = [
            f"KV events of {name} are not in step"
            for name, stats in self._event_stats().items()
            if not stats.is_synced
        ]
        failed = [
            it
            for it in self._records.recent
            if it.failed and now - it.arrived_at - (it.ended or 0.0) < RECENT_S
        ]
        # The words of causes are for operators, who alone may see this.
        errors = [f"{len(failed)} requests failed in the last minute"] if failed else []
        reasons = [*away, *failing, *errors, *late]
        if not self._pool.num_available(NodeKind.DECODE):
            return {"health": "down", "reasons": ["no decode node can be used", *reasons]}
        return {"health": "degraded" if reasons else "healthy", "reasons": reasons}

    def _node(self, node: Node, events: SourceStats | None) -> dict[str, Any]:
        return {
            "name": node.name,
            "label": node.label,
            "kind": node.kind,
            "stage": node.stage,
            "problem": node.problem or self._warming.problem_of(node) or None,
            "rests": node.rests,
            "in_flight": node.view.num_in_flight,
            "tokens_in_flight": node.view.num_tokens_in_flight,
            # Its events are told of below; the seed of their hashes is nobody's to see.
            "info": structs.replace(node.info, kv_events=None),
            "events": events,
        }


def _request(record: RequestRecord) -> dict[str, Any]:
    return {
        "id": record.request.request_id,
        "label": record.request.origin.label,
        "key": record.request.origin.key,
        "at": record.arrived_at,
        "age_s": record.age if record.ended is None else record.ended,
        "first_output_s": record.first_output,
        "outcome": record.outcome,
        "failed": record.failed,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "tokens": record.num_tokens,
        "visits": [_visit(it) for it in record.visits],
    }


def _visit(visit: Visit) -> dict[str, Any]:
    return {
        "kind": visit.kind,
        "node": visit.node,
        "reason": visit.reason,
        "began_s": visit.began,
        "first_output_s": visit.first_output,
        "ended_s": visit.ended,
        "outcome": "" if visit.ended is None else visit.outcome,
        "kv_transfer": visit.kv_transfer,
    }


def _headers_for(page: str) -> dict[str, str]:
    """Nothing runs in the page but its own script, and it asks nobody but its own server."""

    def hash_of(tag: str) -> str:
        content = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        return f"'sha256-{digest}'"

    policy = {
        "default-src": "'none'",
        "style-src": hash_of("style"),
        "script-src": hash_of("script"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
