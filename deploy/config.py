"""A whole cluster as one YAML file. Knows no Ray and starts nothing."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from deploy.yaml_lines import YamlLines
from engine.errors import ConfigError, UnavailableError
from proxy.config import ProxyConfig
from serving.config import Config, NodeConfig, Positive, Seconds, ServerConfig, decode_config
from serving.rpc.address import is_loopback

DEMO_CLUSTER: Final = Path(__file__).parent / "configs" / "demo.yaml"
OWN_HOST: Final = "auto"
MAX_DRAIN_S: Final = 600.0
DRAIN_S: Final = 60.0
"""Of nodes, unless given: longer than the lease of a prefill that nobody has pulled."""
MAX_REPLICAS: Final = 1024
Role = Literal["prefill", "decode", "proxy"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode", "proxy")
Strategy = Literal["PACK", "SPREAD", "STRICT_SPREAD"]
# Infinity would be null to a controller that reads the file from a member.
Amount = Annotated[float, Meta(ge=0.0, le=1e9)]
Replicas = Annotated[int, Meta(ge=0, le=MAX_REPLICAS)]
Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")]


class NoClusterError(UnavailableError):
    """No cluster of that name is up."""


class Scaling(Config, frozen=True, kw_only=True):
    """Bounds and patience of a group that grows and shrinks by what its nodes tell.

    Where Ray Serve has the same option, it has the same name.
    """

    min_replicas: Annotated[
        int,
        Meta(ge=1, le=MAX_REPLICAS, description="Never fewer. No node, no signal: one must stay."),
    ] = 1
    max_replicas: Annotated[Replicas, Meta(description="Never more.")]
    upscale_delay_s: Annotated[
        Seconds, Meta(description="Seconds for which more must have been needed.")
    ] = 10.0
    downscale_delay_s: Annotated[
        Seconds, Meta(description="Seconds for which fewer must have been enough.")
    ] = 300.0

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding reports as a ConfigError."""
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}"
            )

    def bounded(self, num_replicas: int) -> int:
        """The allowed number that is nearest to `num_replicas`."""
        return max(self.min_replicas, min(num_replicas, self.max_replicas))


class PrefillScaling(Scaling, frozen=True, kw_only=True):
    """Prefill nodes follow the prompts that wait, or the number of decode nodes."""

    target_waiting_tokens: Annotated[
        int, Meta(ge=1, description="Prompt tokens, not computed yet, of each node.")
    ] = 8192
    per_decode: Annotated[
        Annotated[float, Meta(gt=0.0, le=1024.0)] | None,
        Meta(description="Prefill nodes for each decode node, instead of by the prompts."),
    ] = None


class DecodeScaling(Scaling, frozen=True, kw_only=True):
    """Decode nodes follow their requests and the room in their arenas."""

    target_ongoing_requests: Annotated[
        int, Meta(ge=1, description="Running and waiting requests of each node.")
    ] = 32
    max_kv_cache_usage: Annotated[
        float,
        Meta(ge=0.01, le=1.0, description="Part of the arenas in use, on average, at most."),
    ] = 0.85


class Group(Config, frozen=True, kw_only=True):
    """Equal members of one role, and the share of a machine that each takes."""

    replicas: Annotated[Replicas, Meta(description="Members of this role.")] = 1
    num_cpus: Annotated[Amount, Meta(description="CPUs that Ray reserves for each.")] = 0.1
    num_gpus: Annotated[
        Amount,
        Meta(description="GPUs that each gets for itself; with one, `device` is cuda by itself."),
    ] = 0.0
    memory_bytes: Annotated[
        Positive | None,
        Meta(
            description="Memory that each gets on Kubernetes, for arena, weights and tiers; Ray "
            "does not count it. Default: no limit."
        ),
    ] = None
    resources: Annotated[
        dict[str, Amount], Meta(description="Custom resources of Ray that each takes.")
    ] = msgspec.field(default_factory=dict)
    labels: Annotated[
        dict[str, str], Meta(description="Labels that a machine of Ray must have for them.")
    ] = msgspec.field(default_factory=dict)
    strategy: Annotated[
        Strategy,
        Meta(description="PACK: few machines; SPREAD: many; STRICT_SPREAD: each its own machine."),
    ] = "SPREAD"
    rolling_update: Annotated[
        Literal["surge", "drain_first"],
        Meta(
            description="A restart starts the new member first (surge, room for one more), or "
            "drains the old one first."
        ),
    ] = "surge"

    def bundle(self) -> dict[str, float]:
        """All that Ray must reserve for one member."""
        gpus = {"GPU": self.num_gpus} if self.num_gpus else {}
        return {"CPU": self.num_cpus, **gpus, **self.resources}


class PrefillGroup(Group, frozen=True, kw_only=True):
    """Prefill nodes."""

    config: Annotated[
        dict[str, Any],
        Meta(
            description="Options of these nodes (options.md, with _), which win over the "
            "cluster's. `host: auto` is the address by which Ray knows the machine: needed as soon "
            "as the members are on several machines."
        ),
    ] = msgspec.field(default_factory=dict)
    autoscaling: Annotated[
        PrefillScaling | None, Meta(description="Grow and shrink by the load.")
    ] = None


class DecodeGroup(Group, frozen=True, kw_only=True):
    """Decode nodes."""

    config: Annotated[
        dict[str, Any], Meta(description="Options of these nodes, as for prefill nodes.")
    ] = msgspec.field(default_factory=dict)
    autoscaling: Annotated[
        DecodeScaling | None, Meta(description="Grow and shrink by the load.")
    ] = None


class ProxyGroup(Group, frozen=True, kw_only=True):
    """Proxies, which all know all nodes."""

    rolling_update: Annotated[
        Literal["surge", "drain_first"],
        Meta(description="As for nodes; a new proxy can only be first where its port is free."),
    ] = "drain_first"
    config: Annotated[
        dict[str, Any], Meta(description="Options of the proxies (options.md, with _).")
    ] = msgspec.field(default_factory=dict)


class ClusterConfig(Config, frozen=True, kw_only=True):
    """One cluster: a model, three groups of members, and what they share."""

    name: Annotated[Label, Meta(description="Tells clusters on one Ray apart.")] = "tandem"
    model: Annotated[
        str, Meta(description="A folder, relative to this file or absolute, or else a hub name.")
    ]
    config: Annotated[
        dict[str, Any],
        Meta(
            description="Options of all nodes, such as `prefix_hash_seed`, which must be equal. "
            "`drain_timeout` is 60 unless given."
        ),
    ] = msgspec.field(default_factory=dict)
    prefill: Annotated[PrefillGroup, Meta(description="Prefill nodes.")] = PrefillGroup()
    decode: Annotated[DecodeGroup, Meta(description="Decode nodes.")] = DecodeGroup()
    proxy: Annotated[ProxyGroup, Meta(description="Proxies.")] = ProxyGroup()
    runtime_env: Annotated[
        dict[str, Any],
        Meta(description="Ray's, for machines that do not have the project or its packages."),
    ] = msgspec.field(default_factory=dict)
    cluster_token: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Shared secret of all members. Default: a random one of the cluster's."),
    ] = None

    def group(self, role: Role) -> PrefillGroup | DecodeGroup | ProxyGroup:
        """The group of a role."""
        match role:
            case "prefill":
                return self.prefill
            case "decode":
                return self.decode
            case "proxy":
                return self.proxy

    def resources(self) -> dict[str, float]:
        """The sum over all members, in Ray's terms."""
        total: Counter[str] = Counter()
        for role in ROLES:
            group = self.group(role)
            for _ in range(group.replicas):
                total.update(group.bundle())
        return dict(total)

    def node(self, role: Role) -> NodeConfig:
        """The NodeConfig of `prefill` or `decode` nodes.

        Unless given, the port is 0, and KV events are on where only this machine can read them.
        """
        group = self.group(role)
        given = {} if group.num_gpus == 0 else {"device": "cuda"}
        # The group's own fields win over those of all nodes.
        fields = {**given, **self._shared_fields(), **group.config}
        # The proxy routes by KV events. They carry prompts in clear text, so a node that others
        # can reach has to be asked for them; without a prefix cache there is nothing to announce.
        events, host = fields.get("kv_events_config", {}), str(fields.get("host", "127.0.0.1"))
        # A wrong value is named where it is decoded.
        caches = fields.get("enable_prefix_caching", True)
        if caches and is_loopback(host) and isinstance(events, dict):
            fields["kv_events_config"] = {"enable_kv_cache_events": True, **events}
        config = decode_config(fields, NodeConfig, f"{role}.config")
        _check(config, f"{role}.config")
        for name, port in (("port", config.port), ("grpc_port", config.grpc_port)):
            if port:
                raise ConfigError(
                    f"{role}.config.{name}: leave it out: nodes take free ones and tell them"
                )
        return config

    def proxy_config(self) -> ProxyConfig:
        """The ProxyConfig of the proxies, with which nodes register. Raises ConfigError."""
        # A cluster that has no token of its own yet gets one before it starts.
        given = {"cluster_token": self.cluster_token or "-", "grpc_port": 0}
        config = decode_config({**given, **self.proxy.config}, ProxyConfig, "proxy.config")
        _check(config, "proxy.config")
        prefill, decode = config.workers
        if config.tokenizer is None and any(it.is_foreign for it in (*prefill, *decode)):
            return msgspec.structs.replace(config, tokenizer=self.model)
        return config

    def check(self) -> None:
        """Raises ConfigError for wrong fields of members, and for ones that must be equal."""
        decode_config(self._shared_fields(), NodeConfig, "config")
        if self.node("prefill").prefix_hash_seed != self.node("decode").prefix_hash_seed:
            raise ConfigError(
                "decode.config.prefix_hash_seed: differs between nodes; give it once, in config"
            )
        prefill, decode = self.proxy_config().workers
        foreign = [it for it in (*prefill, *decode) if it.is_foreign]
        num_own = self.prefill.replicas + self.decode.replicas
        if foreign and num_own:
            raise ConfigError(
                f"proxy.config: {foreign[0].text} is a worker of {foreign[0].backend}, and no node "
                "of this cluster takes its prefills: set prefill.replicas and decode.replicas to 0"
            )
        for name, group, least in (
            ("prefill", self.prefill, 0),
            ("decode", self.decode, 0 if foreign else 1),
            ("proxy", self.proxy, 1),
        ):
            if group.replicas < least:
                raise ConfigError(f"{name}.replicas: must be at least {least}")
            if group.replicas > MAX_REPLICAS:
                raise ConfigError(f"{name}.replicas: must be at most {MAX_REPLICAS}")

    def _shared_fields(self) -> dict[str, Any]:
        given = {"model": self.model, "port": 0, "cluster_token": self.cluster_token}
        return {**given, "drain_timeout": DRAIN_S, **self.config}


def load_cluster(file: Path = DEMO_CLUSTER) -> ClusterConfig:
    """One cluster file. Raises ConfigError naming the file, the line and the key."""
    lines = YamlLines.read(file)
    try:
        config = decode_config(lines.fields, ClusterConfig, "")
        config.check()
    except ConfigError as error:
        raise lines.located(error) from error
    folder = (file.parent / config.model).resolve()
    return msgspec.structs.replace(config, model=str(folder)) if folder.is_dir() else config


def _check(config: ServerConfig, source: str) -> None:
    if config.drain_timeout > MAX_DRAIN_S:
        raise ConfigError(
            f"{source}.drain_timeout: {config.drain_timeout:g} is more than {MAX_DRAIN_S:g} seconds"
        )
    try:
        config.check()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
