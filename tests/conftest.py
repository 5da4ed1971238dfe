"""The order of all tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of ucx come last: once ucxx has brought its own UCX, NIXL in the same process uses TCP.

    A node has one transport; only this process opens both.
    """
    items.sort(key=lambda item: "ucx" in item.name or item.path.name == "test_ucx.py")
