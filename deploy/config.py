"""A whole cluster as one YAML file. Knows no Ray and starts nothing."""

import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.errors import ConfigError
from proxy.config import ProxyConfig
from serving.config import Config, NodeConfig, decode_config, read_yaml
from serving.rpc.address import is_loopback

DEMO_CLUSTER = Path(__file__).parent / "configs" / "demo.yaml"
PLACEMENT_KEYS = ("resources", "num_cpus")
OWN_HOST = "auto"
MAX_DRAIN_S = 30.0
"""`down` and Ctrl-C wait so long for each kind of member, one kind after the other."""

Amount = Annotated[float, Meta(ge=0.0)]


@dataclass(slots=True, frozen=True)
class MemberSpec:
    """One member of the cluster: its name, and what it takes of a machine, in Ray's terms."""

    name: str
    bundle: dict[str, float]

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `proxy`."""
        return self.name.partition("-")[0]


class Placement(Config, frozen=True):
    """The share of a machine that a member takes; `resources` are Ray's custom ones."""

    resources: dict[str, Amount] = msgspec.field(default_factory=dict)
    num_cpus: Amount = 0.1

    def bundle(self) -> dict[str, float]:
        """All that Ray must reserve for one member."""
        return {"CPU": self.num_cpus, **self.resources}


class NodeGroup(Placement, frozen=True):
    """Equal nodes of one kind; `config` holds NodeConfig fields, which win over the cluster's.

    `host: auto` there is the address by which Ray knows the machine: needed as soon as the members
    are on several machines.
    """

    replicas: Annotated[int, Meta(ge=0, le=1024)] = 1
    config: dict[str, Any] = msgspec.field(default_factory=dict)


class ClusterConfig(Config, frozen=True):
    """One cluster. `proxy` holds ProxyConfig fields, `resources` and `num_cpus`.

    `model` is a folder, relative to the YAML file, or else a hub name; `config` holds NodeConfig
    fields of all nodes, such as `prefix_hash_seed`, which must be the same on all of them.
    `runtime_env` is Ray's, for machines that do not have the project or its packages.
    """

    model: str
    runtime_env: dict[str, Any] = msgspec.field(default_factory=dict)
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    prefill: NodeGroup = NodeGroup()
    decode: NodeGroup = NodeGroup()
    proxy: dict[str, Any] = msgspec.field(default_factory=dict)
    cluster_token: Annotated[str, Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: secrets.token_urlsafe(32)
    )

    def member_specs(self) -> tuple[MemberSpec, ...]:
        """All members: prefill nodes, then decode nodes, then the proxy."""
        groups = {"prefill": self.prefill, "decode": self.decode}
        nodes = [
            MemberSpec(f"{kind}-{index}", group.bundle())
            for kind, group in groups.items()
            for index in range(group.replicas)
        ]
        fields = {key: self.proxy[key] for key in PLACEMENT_KEYS if key in self.proxy}
        proxy = decode_config(fields, Placement, "proxy")
        return (*nodes, MemberSpec("proxy", proxy.bundle()))

    def resources(self) -> dict[str, float]:
        """The sum over all members."""
        total: Counter[str] = Counter()
        for spec in self.member_specs():
            total.update(spec.bundle)
        return dict(total)

    def node(self, kind: str) -> NodeConfig:
        """The NodeConfig of `prefill` or `decode` nodes.

        Unless given, the port is 0, and KV events are on where only this machine can read them.
        """
        group = self.prefill if kind == "prefill" else self.decode
        # The group's own fields win over those of all nodes.
        fields = {**self._shared_fields(), **group.config}
        # The proxy routes by KV events. They carry prompts in clear text, so a node that others
        # can reach has to be asked for them; without a prefix cache there is nothing to announce.
        events, host = fields.get("kv_events_config", {}), str(fields.get("host", "127.0.0.1"))
        # A wrong value is named where it is decoded.
        caches = fields.get("enable_prefix_caching", True)
        if caches and is_loopback(host) and isinstance(events, dict):
            fields["kv_events_config"] = {"enable_kv_cache_events": True, **events}
        config = decode_config(fields, NodeConfig, f"{kind}.config")
        _check_drain(config.drain_timeout, f"{kind}.config")
        if group.replicas > 1 and (config.port or config.grpc_port):
            raise ConfigError(f"{kind}.config: {group.replicas} replicas need port 0")
        return config

    def check(self) -> None:
        """Raises ConfigError for wrong fields of members, and for ones that must be equal."""
        decode_config(self._shared_fields(), NodeConfig, "config")
        if self.node("prefill").prefix_hash_seed != self.node("decode").prefix_hash_seed:
            raise ConfigError("prefix_hash_seed differs between nodes; give it once, in config")
        self.proxy_config((), ())
        self.member_specs()
        if self.decode.replicas < 1:
            raise ConfigError("decode.replicas must be at least 1")

    def proxy_config(self, prefill: tuple[str, ...], decode: tuple[str, ...]) -> ProxyConfig:
        """The ProxyConfig for nodes at these URLs. Raises ConfigError."""
        fields = {k: v for k, v in self.proxy.items() if k not in PLACEMENT_KEYS}
        given = {"prefill": prefill, "decode": decode, "cluster_token": self.cluster_token}
        config = decode_config({**fields, **given}, ProxyConfig, "proxy")
        _check_drain(config.drain_timeout, "proxy")
        return config

    def _shared_fields(self) -> dict[str, Any]:
        given = {"model": self.model, "port": 0, "cluster_token": self.cluster_token}
        return {**given, **self.config}


def load_cluster(file: Path = DEMO_CLUSTER) -> ClusterConfig:
    """One cluster file. Raises ConfigError naming the file and the key."""
    fields = read_yaml(file)
    try:
        config = decode_config(fields, ClusterConfig, "cluster")
        config.check()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    folder = (file.parent / config.model).resolve()
    return msgspec.structs.replace(config, model=str(folder)) if folder.is_dir() else config


def _check_drain(seconds: float, source: str) -> None:
    if seconds > MAX_DRAIN_S:
        raise ConfigError(f"{source}: drain_timeout {seconds:g} must be at most {MAX_DRAIN_S:g}")
