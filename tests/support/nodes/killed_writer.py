"""A prefill node that is killed in the middle of its second file: a module with a node's flags."""

from functools import partial

from connector.offload.connector import OffloadBuilder
from serving.cli import node_app
from serving.config import KVTransferConfig, NodeConfig
from serving.node.server import NodeServer
from tests.support.faults.faulty_files import KILLED, FaultyFiles


def _builder_of(config: KVTransferConfig) -> OffloadBuilder:
    # The file by which a node tries the folder at its start is the first of three.
    files = partial(FaultyFiles, fault=KILLED, period=3, is_bad=True)
    return OffloadBuilder(OffloadBuilder.of(config).config, files)


def _node(config: NodeConfig) -> NodeServer:
    return NodeServer(config, "prefill", _builder_of)


if __name__ == "__main__":
    node_app("prefill", 8100, _node)()
