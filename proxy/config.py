"""The options of the proxy, from flags or a YAML file with the same keys. Reads no environment."""

from collections.abc import Mapping
from pathlib import Path

from engine.config import (
    DRAIN_TIMEOUT_S,
    Config,
    ListenPort,
    Seconds,
    check_secrets,
    decode_config,
    read_flags_file,
)
from engine.errors import ConfigError
from engine.rpc.node_http import parse_node_url
from proxy.routing.policies import POLICIES


class ProxyConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One proxy. Node URLs are `http://host:port` (the node's HTTP port) or `grpc://host:port`.

    Of nodes that speak TLS they are `https://` or `grpcs://`.

    The timeouts bound one request as a whole, a node's first token, and the wait between tokens.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: ListenPort = 8000
    api_key: str | None = None
    cluster_token: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    served_model_name: tuple[str, ...] = ()
    enable_prompt_tokens_details: bool = False
    routing_policy: str = "round_robin"
    request_timeout: Seconds = 600.0
    first_token_timeout: Seconds = 120.0
    inter_token_timeout: Seconds = 60.0
    drain_timeout: Seconds = DRAIN_TIMEOUT_S

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding reports as a ConfigError."""
        check_secrets(api_key=self.api_key, cluster_token=self.cluster_token)


def load_config(file: Path | None, flags: Mapping[str, object]) -> ProxyConfig:
    """Defaults, then `file`, then those of `flags` that are not None. Raises `ConfigError`."""
    given = {name: value for name, value in flags.items() if value is not None}
    values = {**(read_flags_file(file) if file else {}), **given}
    config = decode_config(values, ProxyConfig, str(file) if file else "flags")
    _check(config)
    return config


def _check(config: ProxyConfig) -> None:
    if not config.decode:
        raise ConfigError("no decode node: give at least one --decode URL")
    urls = [parse_node_url(text).text for text in (*config.prefill, *config.decode)]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"node {url} is named twice")
    if config.routing_policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"--routing-policy {config.routing_policy!r} is none of: {known}")
