"""MultiConnector: several connectors as one, from vLLM's configuration of that name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from msgspec import Meta
from msgspec.structs import asdict

from connector.multi.scheduler import COUNTERS, GAUGES, MultiScheduler, MultiStats
from connector.multi.worker import MultiWorker
from engine.errors import ConfigError
from engine.kv_connector import Connector, LocalAdmission
from serving.config import Config, KVTransferConfig, decode_config
from serving.node.connector import Build, BuilderOf, NodeConnector, NodeParts, check_groups
from serving.rpc.server import RpcService

SOURCE = "kv_transfer_config.kv_connector_extra_config"


class MultiConnectorConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of the MultiConnector."""

    connectors: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Each a `--kv-transfer-config`; role and failure policy default to the "
            "node's."
        ),
    ]


@dataclass(frozen=True)
class MultiConnector(NodeConnector):
    """A node's connectors as one, in the order of the configuration, under their names."""

    connector: Connector
    children: Mapping[str, NodeConnector]

    @classmethod
    def builder(cls, config: KVTransferConfig, builder_of: BuilderOf) -> Build:
        """Raises ConfigError naming the child that cannot be built."""
        extra = decode_config(config.kv_connector_extra_config, MultiConnectorConfig, SOURCE)
        inherited = asdict(config)
        del inherited["kv_connector"], inherited["kv_connector_extra_config"]
        builders: dict[str, Build] = {}
        for number, fields in enumerate(extra.connectors):
            source = f"{SOURCE}.connectors[{number}]"
            own = decode_config({**inherited, **fields}, KVTransferConfig, source)
            if own.kv_connector in builders:
                raise ConfigError(f"{SOURCE}: {own.kv_connector} is there twice; leave one out")
            try:
                builders[own.kv_connector] = builder_of(own)
            except ConfigError as error:
                raise ConfigError(f"{source} ({own.kv_connector}): {error}") from error
        if not builders:
            raise ConfigError(f"{SOURCE}: connectors is empty; name at least one")
        return lambda node: cls.over(builders, node)

    @classmethod
    def over(cls, builders: Mapping[str, Build], node: NodeParts) -> Self:
        children: dict[str, NodeConnector] = {}
        for name, build in builders.items():
            children[name] = build(node)
            check_groups(f"{SOURCE}.connectors: {name}", children[name].connector, node.plan)
        stats = MultiStats(children)
        node.metrics.read(stats, gauges=GAUGES, counters=COUNTERS)
        sides = {name: child.connector for name, child in children.items()}
        schedulers = {name: side.scheduler for name, side in sides.items()}
        # Transfer parameters are for one connector: that which talks to peers, if there is one.
        admissions = (side.admission for side in sides.values())
        judges = [it for it in admissions if not isinstance(it, LocalAdmission)]
        if len(judges) > 1:
            raise ConfigError(f"{SOURCE}: two connectors take kv_transfer_params; leave one out")
        made = Connector(
            judges[0] if judges else LocalAdmission(),
            MultiScheduler(node.plan, schedulers, stats),
            MultiWorker({name: side.worker for name, side in sides.items()}),
        )
        return cls(made, children)

    def services(self) -> Sequence[RpcService]:
        return [service for child in self.children.values() for service in child.services()]

    def advertise(self, port: int) -> None:
        for child in self.children.values():
            child.advertise(port)

    def is_awaited(self) -> bool:
        return any(child.is_awaited() for child in self.children.values())

    def link_bytes_per_s(self) -> float:
        return max(child.link_bytes_per_s() for child in self.children.values())
