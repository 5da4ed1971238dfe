"""Fixtures of the end-to-end tests; their parts are in tests/cluster.py and tests/processes.py."""

import pytest

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every test that compares by margin says how many near-ties it met."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "near-ties" and report.when == "call":
                terminalreporter.write_line(f"{name}: {value} in {report.nodeid}")
