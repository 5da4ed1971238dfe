"""The order of all tests, and which of them share a worker of `pytest -n`.

`--dist loadgroup --no-loadscope-reorder` hands groups out in this order, one after the other.
"""

import pytest

# The longest tests first, so that both workers end together.
TIERS = ("contract", "e2e/test_ray", "e2e", "ops", "unit", "")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is a group, and so are all tests that ask one cluster of real processes."""
    items.sort(key=_place)
    for item in items:
        shared = "served_by_processes" in getattr(item, "fixturenames", ())
        group = "served" if shared else item.path.stem
        item.add_marker(pytest.mark.xdist_group(f"{group}-ucx" if _opens_ucx(item) else group))


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
    path = "/".join(item.path.parts[-2:])
    tier = next(n for n, tier in enumerate(TIERS) if path.startswith(tier))
    # Nodes that tests share are closed before a test whose nodes are its own.
    return _opens_ucx(item), tier, path, "shared" in getattr(item, "fixturenames", ())


def _opens_ucx(item: pytest.Item) -> bool:
    return "ucx" in item.name or item.path.name == "test_ucx.py"
