"""The facts that a worker of SGLang tells of itself: its part, its life, load and KV events. Pure.

Read from /server_info, /model_info and /v1/loads.
"""

import hashlib
from typing import Annotated, Any, Final, TypeVar

import msgspec
import structlog
from msgspec import Meta

from engine.errors import UnavailableError
from engine.types import Port
from proxy.backends.worker_facts import EventEndpoints, told_endpoints
from serving.rpc.address import join_host_port
from serving.rpc.messages import KVEventsInfo, KVGroupInfo
from serving.rpc.node_http import NodeUrl

log = structlog.get_logger()

FAKE_TRANSFER: Final = "fake"
"""A transfer of SGLang's for tests of speed: D answers, and no key has moved."""


class _KVEvents(msgspec.Struct):
    """Rank `r` of `dp_size` publishes on the port `r` above the base."""

    endpoint_host: str
    endpoint_port_base: Port
    block_size: Annotated[int, Meta(ge=1)]
    topic: str = ""
    dp_size: int = 1
    replay_endpoint_port_base: Port | None = None


class _State(msgspec.Struct):
    """One scheduler's words. The part is that of now, which /pd_role_switch changes."""

    disaggregation_mode: str | None = None


class ServerInfo(msgspec.Struct):
    """Parts of /server_info. `startup_time`: seconds of phases, measured in each life."""

    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: Port | None = None
    disaggregation_transfer_backend: str | None = None
    random_seed: int | None = None
    startup_time: Any = None
    kv_events: _KVEvents | None = None
    internal_states: tuple[_State, ...] = ()

    @property
    def mode(self) -> str:
        """The part that its schedulers play now: "prefill", "decode", or "null" for both."""
        told = [it.disaggregation_mode for it in self.internal_states]
        return next((mode for mode in told if mode), self.disaggregation_mode)

    @property
    def life(self) -> str:
        """Another text in each life."""
        parts = [self.random_seed, self.startup_time]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]

    def events_at(
        self, url: NodeUrl, given: EventEndpoints | None, model: str
    ) -> KVEventsInfo | None:
        """Where the worker at `url` tells of its cache; None where it does not.

        States of Mamba layers are not in its events.
        """
        told = self.kv_events
        if told is None:
            return None
        if told.dp_size > 1:
            log.warning("events of data-parallel ranks are not read", node=url.text)
            return None
        endpoints = given or _endpoints(url, told)
        return KVEventsInfo(
            publisher="sglang",
            endpoint=endpoints.endpoint,
            replay_endpoint=endpoints.replay_endpoint,
            topic=endpoints.topic,
            hash_block_size=told.block_size,
            groups=(KVGroupInfo("full_attention"),),
            model_identity=model,
        )


class ModelInfo(msgspec.Struct):
    """Parts of /model_info."""

    model_path: str
    tokenizer_path: str | None = None


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    token_usage: float = 0.0
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0


class Loads(msgspec.Struct):
    """/v1/loads, of all data-parallel ranks."""

    loads: tuple[_Load, ...] = ()

    def total(self, name: str) -> int:
        """The sum over all ranks."""
        return sum(max(0, getattr(load, name)) for load in self.loads)

    @property
    def usage(self) -> float:
        """Of the fullest rank, 0 to 1."""
        return min(1.0, max((0.0, *(load.token_usage for load in self.loads))))


_T = TypeVar("_T", bound=msgspec.Struct)


def told(body: bytes, kind: type[_T], path: str) -> _T:
    """Raises UnavailableError for an answer that is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnavailableError(f"{path} is not that of SGLang: {error}") from error


def _endpoints(url: NodeUrl, told: _KVEvents) -> EventEndpoints:
    endpoint, replay = (
        None if port is None else f"tcp://{join_host_port(told.endpoint_host.strip('[]'), port)}"
        for port in (told.endpoint_port_base, told.replay_endpoint_port_base)
    )
    assert endpoint is not None
    return told_endpoints(url, endpoint, replay=replay, topic=told.topic)
