"""The order of all tests, which of them share a worker of `pytest -n`, and hypothesis' settings.

`--dist loadscope --no-loadscope-reorder` hands groups out in this order, one after the other.
"""

import os
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# Triton's kernels run in its interpreter; it looks when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

# Where transformers finds fla it computes with its kernels, on a CPU too, where they do not run.
sys.modules["fla"] = None  # type: ignore[assignment]

# A busy machine is no failure, and every run tries the same examples; tests that cross more say so.
settings.register_profile("everyday", deadline=None, derandomize=True)
settings.load_profile("everyday")

TESTS = Path(__file__).parent
LONGEST = "e2e/test_benchmarks_run.py"
# The longest tests first, so that all workers end together.
TIERS = ("contract", "e2e/test_ray", "e2e", "ops", "unit", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By tier and file."""
    items.sort(key=_place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Hands out groups as this file cuts them: xdist's own marks do not reach pytest 9.2's ids."""
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _group
    return scheduler


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every test that compares by margin says how many near-ties it met."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "near-ties" and report.when == "call":
                terminalreporter.write_line(f"{name}: {value} in {report.nodeid}")


def _place(item: pytest.Item) -> tuple[bool, int, str, bool]:
    """Tests of ucx come last: once ucxx has brought its own UCX, NIXL in the same process uses TCP.

    A node has one transport; only a test process opens both. Contract tests come first in both
    halves: UCX reads the routes once per process, and their second host must be up by then.
    """
    path = item.path.relative_to(TESTS).as_posix()
    tier = next(n for n, tier in enumerate(TIERS) if path.startswith(tier))
    # Nodes that tests share are closed before a test whose nodes are its own.
    return _opens_ucx(item), tier, path, "shared" in getattr(item, "fixturenames", ())


def _opens_ucx(item: pytest.Item) -> bool:
    return _is_ucx(item.nodeid)


def _group(nodeid: str) -> str:
    """A file is a group, its tests of ucx are another one.

    `LONGEST` is two: its tests share nothing, and one worker would need a quarter of an hour for
    them. Three of its benchmarks at once would hardly come to measure within their bounds.
    """
    path = nodeid.partition("::")[0]
    if path.endswith(LONGEST):
        return f"{path} {zlib.crc32(nodeid.encode()) % 2}"
    return f"{path} ucx" if _is_ucx(nodeid) else path


def _is_ucx(nodeid: str) -> bool:
    path, _, test = nodeid.partition("::")
    return "ucx" in test or path.endswith("/test_ucx.py")
