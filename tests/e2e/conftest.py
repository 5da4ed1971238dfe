"""Fixtures of the end-to-end tests; their parts are in tests/cluster.py."""

from tests.cluster import checkpoints, cluster, one_thread

__all__ = ["checkpoints", "cluster", "one_thread"]
