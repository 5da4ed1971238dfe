"""`kv_connector` by name: which connectors a node can be started with.

A program may add its own to `CONNECTORS` before it starts a node: `examples/own_connector.py`.
"""

from typing import Final

from connector.multi.connector import MultiConnector
from connector.offload.connector import OffloadConnector
from connector.pd.connector import PdConnector
from engine.errors import ConfigError
from serving.config import KVTransferConfig
from serving.node.connector import Build, NodeConnector

CONNECTORS: Final[dict[str, type[NodeConnector]]] = {
    "PdConnector": PdConnector,
    "OffloadConnector": OffloadConnector,
    "MultiConnector": MultiConnector,
}


def builder_of(config: KVTransferConfig) -> Build:
    """Builds the connector that `config` names; raises ConfigError when that cannot be."""
    found = CONNECTORS.get(config.kv_connector)
    if found is None:
        raise ConfigError(
            f"kv_connector {config.kv_connector!r} is not known; use one of {', '.join(CONNECTORS)}"
        )
    return found.builder(config, builder_of)
