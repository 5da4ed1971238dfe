"""Which transport a node opens, by name and by `auto`."""

from contextlib import closing

import pytest

from connector.pd.params import is_loopback
from connector.transports.choose import (
    TRANSPORTS,
    choose_transport,
    is_installed,
    open_transport,
)
from engine.config import PdConnectorConfig, decode_config
from engine.errors import ConfigError


def test_auto_and_unknown_names() -> None:
    assert open_transport("auto", "d").name == "shm"
    with closing(open_transport("auto", "d", same_host=False)) as both:
        assert both.name == "shm+nixl"
    with pytest.raises(ConfigError, match="unknown transport 'smoke'"):
        open_transport("smoke", "d")


def test_auto_across_hosts_takes_the_first_that_is_installed_and_says_why() -> None:
    name, reason = choose_transport(same_host=False, is_installed=lambda package: True)
    assert name == "nixl"
    assert reason.startswith("peers may be on other hosts")
    name, reason = choose_transport(same_host=False, is_installed=lambda package: package == "zmq")
    assert name == "zmq"
    assert "nixl is not installed (pip install 'tandem[nixl]')" in reason
    with pytest.raises(ConfigError, match="no transport reaches other hosts"):
        choose_transport(same_host=False, is_installed=lambda package: False)
    assert choose_transport(same_host=True, is_installed=lambda package: False)[0] == "shm"


def test_packages_are_looked_for_without_an_import() -> None:
    assert is_installed("zmq")
    assert not is_installed("no_such_package_of_ours")
    assert all(is_transport_option(name) for name in TRANSPORTS)
    assert not is_transport_option("smoke")


def is_transport_option(name: str) -> bool:
    try:
        decode_config({"transport": name}, PdConnectorConfig, "flags")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True),
        ("10.0.0.5", False), ("fe80::1", False), ("node-7", False), ("0.0.0.0", False),
    ],
)  # fmt: skip
def test_only_a_loopback_host_means_that_all_peers_are_here(host: str, here: bool) -> None:
    assert is_loopback(host) is here
