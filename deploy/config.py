"""A whole cluster as one YAML file. Knows no Ray and starts nothing."""

import secrets
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.config import Config, ListenPort, NodeConfig, decode_config
from engine.errors import ConfigError
from proxy.config import ProxyConfig

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
PLACEMENT_KEYS = ("resources", "num_cpus")

Amount = Annotated[float, Meta(ge=0.0)]


class NodeGroup(Config, frozen=True):
    """Equal nodes of one kind; `config` holds NodeConfig fields, `resources` Ray's custom ones."""

    replicas: Annotated[int, Meta(ge=0, le=1024)] = 1
    resources: dict[str, Amount] = msgspec.field(default_factory=dict)
    num_cpus: Amount = 0.1
    config: dict[str, Any] = msgspec.field(default_factory=dict)


class ProxyPlacement(Config, frozen=True):
    """Where the proxy runs, in Ray's terms."""

    resources: dict[str, Amount] = msgspec.field(default_factory=dict)
    num_cpus: Amount = 0.1


class ClusterConfig(Config, frozen=True):
    """One cluster. `proxy` holds ProxyConfig fields, `resources` and `num_cpus`."""

    model: str = str(DEMO_MODEL)
    prefill: NodeGroup = NodeGroup()
    decode: NodeGroup = NodeGroup()
    proxy: dict[str, Any] = msgspec.field(default_factory=dict)
    cluster_token: Annotated[str, Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: secrets.token_urlsafe(32)
    )

    def node(self, kind: str, group: NodeGroup, source: str) -> NodeConfig:
        """The NodeConfig of each node of `group`; port 0 unless told otherwise."""
        fields = {
            "model": self.model,
            "port": 0,
            "cluster_token": self.cluster_token,
            **group.config,
        }
        config = decode_config(fields, NodeConfig, f"{source}: {kind}.config")
        if group.replicas > 1 and (config.port or config.grpc_port):
            raise ConfigError(f"{source}: {kind}.config: {group.replicas} replicas need port 0")
        return config

    def proxy_config(
        self, prefill: tuple[str, ...], decode: tuple[str, ...], source: str
    ) -> ProxyConfig:
        """The ProxyConfig for nodes at these URLs. Raises ConfigError."""
        fields = {k: v for k, v in self.proxy.items() if k not in PLACEMENT_KEYS}
        given = {"prefill": prefill, "decode": decode, "cluster_token": self.cluster_token}
        try:
            return msgspec.convert({**fields, **given}, ProxyConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{source}: proxy: {error}") from error

    def proxy_placement(self, source: str) -> ProxyPlacement:
        """Ray's part of `proxy`. Raises ConfigError."""
        fields = {key: self.proxy[key] for key in PLACEMENT_KEYS if key in self.proxy}
        return decode_config(fields, ProxyPlacement, f"{source}: proxy")


class ClusterState(Config, frozen=True):
    """What another shell needs to reach an embedded cluster; written by `up`, 0600."""

    pid: Annotated[int, Meta(ge=1)]
    address: str
    token_path: str
    port: ListenPort = 0


def load_cluster(file: Path | None) -> ClusterConfig:
    """`file`, or the demo cluster. Raises ConfigError naming the file and the key."""
    source = str(file) if file else "built-in cluster"
    config = decode_config(_read(file) if file else {}, ClusterConfig, source)
    config.node("prefill", config.prefill, source)
    config.node("decode", config.decode, source)
    config.proxy_config((), (), source)
    config.proxy_placement(source)
    if config.decode.replicas < 1:
        raise ConfigError(f"{source}: decode.replicas must be at least 1")
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        fields = msgspec.yaml.decode(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is not YAML: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} must hold a mapping")
    return fields
