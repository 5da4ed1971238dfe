"""Prompts and nodes as a routing policy sees them, without a cluster."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engine.types import GenerateRequest
from proxy.cluster.node import NodeView
from proxy.routing.policies import Route
from proxy.routing.prompt import NodeHit, RoutedPrompt
from serving.rpc.messages import KVEventsInfo, KVGroupInfo, NodeInfo

SIZE = 16
GROUPS = (KVGroupInfo(kind="full_attention"), KVGroupInfo(kind="mamba"))
EVENTS = KVEventsInfo(endpoint="none", hash_block_size=SIZE, groups=GROUPS)


def node(
    name: str,
    *,
    queued: int = 0,
    in_flight: int = 0,
    usage: float = 0.0,
    tokens: int = 0,
    events: KVEventsInfo | None = None,
    **measured: Any,
) -> NodeView:
    info = NodeInfo(
        engine_id=f"{name}-1",
        kind="decode",
        model_names=("tiny",),
        max_model_len=64,
        vocab_size=8,
        num_requests_waiting=queued,
        kv_cache_usage=usage,
        kv_events=events,
        **measured,
    )
    return NodeView(name, info, in_flight, tokens)


def prompt(
    tokens: Sequence[int] = (1,),
    hits: Mapping[str, NodeHit] = MappingProxyType({}),
    session: str | None = None,
) -> RoutedPrompt:
    request = GenerateRequest(request_id="r", prompt_token_ids=tuple(tokens), session_id=session)
    routed = RoutedPrompt(request)
    routed.hits = hits
    return routed


def names(route: Route) -> tuple[str | None, str]:
    return None if route.prefill is None else route.prefill.name, route.decode.name


def with_events(*given: str) -> list[NodeView]:
    return [node(name, events=EVENTS) for name in given]
