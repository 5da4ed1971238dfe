"""A prefill node that is killed in the middle of its second file: a module with a node's flags."""

from functools import partial

from connector.offload.connector import OffloadConnector
from serving.cli import node_app
from serving.config import NodeConfig
from serving.node.server import NodeServer
from tests.support.faults.faulty_files import KILLED, FaultyFiles


def _node(config: NodeConfig) -> NodeServer:
    # The file by which a node tries the folder at its start is the first of three.
    files = partial(FaultyFiles, fault=KILLED, period=3, is_bad=True)
    return NodeServer(config, "prefill", partial(OffloadConnector.builder, open_files=files))


if __name__ == "__main__":
    node_app("prefill", 8100, _node)()
