"""Fixtures of the end-to-end tests; their parts are in tests/cluster.py and tests/processes.py."""

from tests.cluster import checkpoints, cluster, one_thread, warm
from tests.processes import real, served, served_by_processes

__all__ = [
    "checkpoints",
    "cluster",
    "one_thread",
    "real",
    "served",
    "served_by_processes",
    "warm",
]
