"""Where a node may listen, and what it tells its peers about it; in hosts made for the test."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from os import getpid

import pytest
import structlog

from connector.registry import builder_of
from engine.errors import ConfigError
from serving.config import NodeConfig, decode_config
from serving.hosts import advertised_host
from serving.node.server import NodeServer
from tests.support.network.netns import End, cable, enter, namespaces, run, skip_if_impossible

Inside = Callable[[str, str | None], str]


@contextmanager
def a_host(*addresses: str) -> Iterator[tuple[str, Inside]]:
    """Its name, and `advertised_host` as it answers there; one cable for each address."""
    skip_if_impossible()
    name, other = f"tandem-h-{getpid()}", f"tandem-o-{getpid()}"
    with ExitStack() as stack:
        stack.enter_context(namespaces(name, other))
        for number, address in enumerate(addresses):
            end, far = End(f"cable{number}", name), End(f"far{number}", other)
            stack.enter_context(cable(end, far))
            far.set_up()
            end.set_up(f"{address}/24")
        pool = stack.enter_context(ThreadPoolExecutor(1, initializer=partial(enter, name)))
        yield name, lambda host, asked: pool.submit(advertised_host, host, asked).result()


def test_a_wildcard_advertises_the_address_of_the_default_route() -> None:
    with a_host("10.78.1.5", "10.78.2.5") as (name, advertised):
        with pytest.raises(ConfigError, match=r"10\.78\.1\.5, 10\.78\.2\.5.*--advertise-host"):
            advertised("0.0.0.0", None)
        assert advertised("0.0.0.0", "10.78.1.5") == "10.78.1.5"
        run("ip", "-n", name, "route", "add", "default", "via", "10.78.2.1")
        assert advertised("0.0.0.0", None) == "10.78.2.5"
        assert advertised("::", None) == "10.78.2.5"
        assert advertised("10.78.1.5", None) == "10.78.1.5"


def test_without_a_default_route_the_only_address_is_advertised_and_loopback_with_a_warning() -> (
    None
):
    with a_host("10.78.3.5") as (_, advertised):
        assert advertised("0.0.0.0", None) == "10.78.3.5"
    with a_host() as (_, advertised), structlog.testing.capture_logs() as logs:
        assert advertised("0.0.0.0", None) == "127.0.0.1"
    assert [log["log_level"] for log in logs] == ["warning"]
    assert "--advertise-host" in logs[0]["event"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"host": "203.0.113.9"}, "--host 203.0.113.9 is not an address of this machine"),
        ({"host": "no-such-host.invalid"}, "--host 'no-such-host.invalid' is neither an address"),
        ({"host": "0.0.0.0", "advertise_host": "203.0.113.9"}, "--advertise-host 203.0.113.9 is"),
        ({"host": "0.0.0.0", "advertise_host": "0.0.0.0"}, "no address that peers can connect to"),
        ({"advertise_host": "127.0.0.2"}, "is not where this node listens, --host 127.0.0.1"),
    ],
)
async def test_an_address_of_another_machine_is_called_that(
    flags: dict[str, str], said: str
) -> None:
    """Before a model is looked for, and whether or not the port is free."""
    with pytest.raises(ConfigError) as caught:
        config = decode_config({"model": "none", **flags}, NodeConfig, "flags")
        await NodeServer(config, "prefill", builder_of).start()
    assert said in str(caught.value)
