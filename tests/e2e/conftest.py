"""Fixtures of the end-to-end tests; their parts are in tests/cluster.py and tests/processes.py."""

from tests.cluster import checkpoints, one_thread, warm
from tests.processes import real, served, served_by_processes
from tests.shared_nodes import cluster, shared, shared_nodes

__all__ = [
    "checkpoints",
    "cluster",
    "one_thread",
    "real",
    "served",
    "served_by_processes",
    "shared",
    "shared_nodes",
    "warm",
]
