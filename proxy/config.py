"""What the proxy can be told, by flags or a YAML file with the same keys. Reads no environment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.errors import ConfigError
from proxy.cluster.node_url import parse_node_url
from proxy.routing.policy import POLICIES

_URL = "http://host:port of its HTTP server, or grpc://host:port. Repeat for several."


def _text(description: str) -> Meta:
    return Meta(description=description)


def _seconds(description: str) -> Meta:
    return Meta(gt=0.0, le=86_400.0, description=description)


class ProxyConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"
):
    """One proxy. Descriptions are the help of the flags; `env` names a variable that `__main__` reads."""

    prefill: Annotated[tuple[str, ...], _text(f"A prefill node: {_URL}")] = ()
    decode: Annotated[tuple[str, ...], _text(f"A decode node: {_URL}")] = ()
    host: Annotated[str, _text("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port; 0 picks a free one.")] = 8000
    api_key: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="Key that clients must send; none lets everybody in.",
                extra={"env": "TANDEM_API_KEY"},
            ),
        ]
        | None
    ) = None
    cluster_token: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="Token that the nodes of this cluster ask for.",
                extra={"env": "TANDEM_CLUSTER_TOKEN"},
            ),
        ]
        | None
    ) = None
    served_model_name: Annotated[
        tuple[str, ...], _text("Name for clients instead of the nodes' own. Repeat for aliases.")
    ] = ()
    routing_policy: Annotated[str, _text(f"One of: {', '.join(sorted(POLICIES))}.")] = "round_robin"
    request_timeout: Annotated[float, _seconds("Seconds that one request may take in all.")] = 600.0
    first_token_timeout: Annotated[
        float, _seconds("Seconds that a node may take until its first token.")
    ] = 120.0
    inter_token_timeout: Annotated[
        float, _seconds("Seconds that a node may take between tokens.")
    ] = 60.0
    drain_timeout: Annotated[
        float, _seconds("Seconds that running requests get when the proxy stops.")
    ] = 30.0


def load_config(file: Path | None, flags: Mapping[str, object]) -> ProxyConfig:
    """Defaults, then `file`, then `flags` (keyed as in the file). Raises `ConfigError`."""
    values = {**({} if file is None else _read_yaml(file)), **flags}
    try:
        config = msgspec.convert(values, ProxyConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"proxy configuration: {error}") from error
    _check(config)
    return config


def _read_yaml(file: Path) -> dict[str, object]:
    try:
        return msgspec.yaml.decode(file.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ConfigError(f"cannot read --config {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--config {file} is not a YAML mapping: {error}") from error


def _check(config: ProxyConfig) -> None:
    if not config.decode:
        raise ConfigError("no decode node: give at least one --decode URL")
    addresses = [parse_node_url(text).text for text in (*config.prefill, *config.decode)]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"node {address} is named twice")
    if config.routing_policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"routing-policy {config.routing_policy!r} is none of: {known}")
