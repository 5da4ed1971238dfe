"""Fixtures of the end-to-end tests; their parts are in `tests/support/nodes/`."""

from tests.support.network.two_hosts import hosts
from tests.support.nodes.cluster import checkpoints, model, one_thread, warm
from tests.support.nodes.processes import real, served, served_by_processes
from tests.support.nodes.shared_nodes import cluster, shared, shared_nodes

__all__ = [
    "checkpoints",
    "cluster",
    "hosts",
    "model",
    "one_thread",
    "real",
    "served",
    "served_by_processes",
    "shared",
    "shared_nodes",
    "warm",
]
