"""The facts that a worker of another engine tells of itself: model, load, geometry, KV events.

Read from /v1/models, from Prometheus text and from the addresses of ZeroMQ. Pure.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from engine.errors import ConfigError, UnavailableError
from serving.rpc.address import join_host_port
from serving.rpc.node_http import NodeUrl, parse_node_url

MAX_COUNT: Final = 1e15
"""Of a sample that is believed."""
ANY_HOST: Final = ("*", "0.0.0.0", "[::]", "::")
_LINE: Final = re.compile(rb"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)", re.M)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ENDPOINT: Final = re.compile(r"tcp://(\*|[\w.-]+|\[[\w.:%]*\]):(\d{1,5})|ipc://.+")


@dataclass(slots=True, frozen=True)
class EventEndpoints:
    """ZeroMQ addresses of a worker's KV events, as others reach them."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of /v1/models. Adapters have a `parent`."""

    id: Annotated[str, Meta(min_length=1, max_length=1024)]
    max_model_len: Annotated[int, Meta(ge=1)]
    root: str | None = None
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: Annotated[tuple[ModelCard, ...], Meta(max_length=4096)]


class _Load(msgspec.Struct):
    server_load: int = 0


_MODELS: Final = msgspec.json.Decoder(_ModelList)


def model_cards(body: bytes) -> tuple[ModelCard, ...]:
    """The served names of /v1/models, without adapters. Raises UnavailableError for none."""
    try:
        cards = _MODELS.decode(body).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnavailableError(f"/v1/models is no list of models: {error}") from error
    if not (own := tuple(card for card in cards if card.parent is None)):
        raise UnavailableError("/v1/models names no model")
    return own


def server_load(body: bytes) -> int:
    """Requests under way, by vLLM's /load; 0 where it does not tell."""
    try:
        return max(0, msgspec.json.decode(body, type=_Load).server_load)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0


class Metrics:
    """Samples of a /metrics page whose names are asked for; others cost one look each."""

    def __init__(self, page: bytes, names: frozenset[str]) -> None:
        self._samples: dict[str, list[tuple[str, float]]] = {}
        for name, labels, value in _samples(page, frozenset(it.encode() for it in names)):
            self._samples.setdefault(name, []).append((labels, value))

    def has(self, name: str) -> bool:
        """True where there is a sample."""
        return name in self._samples

    def total(self, name: str, label: str = "") -> float:
        """The sum over all samples that have a label, as `name="value"`; 0 where there is none."""
        return sum(value for labels, value in self._samples.get(name, ()) if label in labels)

    def largest(self, name: str) -> float:
        """The largest over all labels; 0 where there is none."""
        return max((value for _, value in self._samples.get(name, ())), default=0.0)

    def labels(self, name: str) -> dict[str, str]:
        """The labels of the first sample, such as of an info metric."""
        for labels, _ in self._samples.get(name, ()):
            return dict(_LABEL.findall(labels))
        return {}


def _samples(page: bytes, names: frozenset[bytes]) -> Iterator[tuple[str, str, float]]:
    for found in _LINE.finditer(page):
        if found[1] not in names:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        # A lie, or no count: infinity is no integer, and NaN would pass every comparison.
        if 0 <= value <= MAX_COUNT:
            yield found[1].decode(), (found[2] or b"").decode(errors="replace"), value


class CounterRate:
    """Prompt tokens computed per second of prefilling, between two looks at counters."""

    def __init__(self) -> None:
        self._before = (0.0, 0.0)
        self._rate = 0.0

    def after(self, num_tokens: float, seconds: float) -> float:
        """Tokens per second; 0 where nothing was ever computed."""
        more_tokens, more_s = num_tokens - self._before[0], seconds - self._before[1]
        if more_tokens > 0 and more_s > 0:
            self._rate = more_tokens / more_s
        self._before = num_tokens, seconds
        return self._rate


def parse_event_endpoints(text: str) -> tuple[str, EventEndpoints]:
    """`http://host:port=tcp://host:port[,tcp://host:port]`: a worker's URL and its endpoints."""
    url, equals, endpoints = text.partition("=")
    endpoint, _, replay = endpoints.partition(",")
    given = [endpoint, *([replay] if replay else [])]
    if not equals or not all(_ENDPOINT.fullmatch(each) for each in given):
        raise ConfigError(
            f"--kv-events-endpoint {text!r} must be http://host:port=tcp://host:port, perhaps with "
            "a comma and the replay endpoint"
        )
    worker = parse_node_url(url.rpartition("+")[2])
    return worker.text, told_endpoints(worker, endpoint, replay=replay or None)


def told_endpoints(
    url: NodeUrl, endpoint: str, *, replay: str | None, topic: str = ""
) -> EventEndpoints:
    """Endpoints as the worker at `url` writes them: where it binds any host, ours is its own."""
    reachable = _reachable(url, endpoint)
    return EventEndpoints(reachable, None if replay is None else _reachable(url, replay), topic)


def _reachable(url: NodeUrl, endpoint: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in ANY_HOST:
        return endpoint
    return f"tcp://{join_host_port(url.host, int(port))}"


class _Source(msgspec.Struct):
    endpoint: str = ""
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    replay_endpoint: str | None = None
    topic: Annotated[str, Meta(max_length=256)] = ""

    @property
    def is_open(self) -> bool:
        """True where others can subscribe."""
        addresses = [self.endpoint, *([self.replay_endpoint] if self.replay_endpoint else [])]
        is_on = self.enable_kv_cache_events and self.publisher == "zmq"
        return is_on and all(_ENDPOINT.fullmatch(it) for it in addresses)


def sources_of(url: NodeUrl, body: bytes) -> list[EventEndpoints]:
    """vLLM's /kv_event_sources: by data-parallel rank where KV events are published."""
    try:
        told = msgspec.json.decode(body, type=dict[str, _Source])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    return [
        told_endpoints(url, it.endpoint, replay=it.replay_endpoint, topic=it.topic)
        for it in told.values()
        if it.is_open
    ]
