"""`kv_connector` by name: which connectors a node can be started with."""

from collections.abc import Mapping
from typing import Final

from connector.multi.connector import MultiBuilder
from connector.offload.connector import OffloadBuilder
from connector.pd.connector import PdBuilder
from engine.errors import ConfigError
from serving.config import KVTransferConfig
from serving.node.connector import BuilderOf, ConnectorBuilder


def builder_of(config: KVTransferConfig) -> ConnectorBuilder:
    """The builder of the connector that `config` names; raises ConfigError when it cannot be."""
    found = CONNECTORS.get(config.kv_connector)
    if found is None:
        raise ConfigError(
            f"kv_connector {config.kv_connector!r} is not known; use one of {', '.join(CONNECTORS)}"
        )
    return found(config)


CONNECTORS: Final[Mapping[str, BuilderOf]] = {
    "PdConnector": PdBuilder.of,
    "OffloadConnector": OffloadBuilder.of,
    "MultiConnector": lambda config: MultiBuilder.of(config, builder_of),
}
