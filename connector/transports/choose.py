"""The table of transports, and which one `auto` means. Knows no transport's inside."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

import structlog

from connector.transports.arena_transport import ArenaTransport
from connector.transports.base import Transport
from connector.transports.near_and_far import NearAndFar
from connector.transports.nixl import NixlTransport
from connector.transports.shm import ShmTransport
from connector.transports.ucx import UcxTransport
from connector.transports.zmq import ZmqTransport
from engine.errors import ConfigError


class TransportRow(NamedTuple):
    """The class of a transport, and the package that it imports.

    `extra`: what installs the package, in `pip install tandem[extra]`; None: it comes with tandem.
    """

    kind: type[ArenaTransport[Any]]
    package: str | None = None
    extra: str | None = None


# Across hosts `auto` takes the first that is installed, top down.
TRANSPORTS: Mapping[str, TransportRow] = MappingProxyType(
    {
        "shm": TransportRow(ShmTransport),
        "nixl": TransportRow(NixlTransport, "nixl", "nixl"),
        "ucx": TransportRow(UcxTransport, "ucxx", "ucx"),
        "zmq": TransportRow(ZmqTransport, "zmq"),
    }
)


def open_transport(
    name: str,
    agent_name: str,
    *,
    same_host: bool = True,
    on_device: bool = False,
    host: str = "127.0.0.1",
) -> Transport:
    """A transport by name, or by `auto`: shm for peers on this host, another one for the rest.

    `same_host`: all peers are on this host. `on_device`: the arena is not in host memory. `host`:
    where a transport listens that has to. Raises ConfigError for an unknown name, a missing
    package, or a transport that cannot serve such an arena.
    """
    chosen, reason = name, "configured"
    if name == "auto":
        chosen, reason = choose_transport(
            same_host=same_host, on_device=on_device, is_installed=is_installed
        )
    if chosen not in TRANSPORTS:
        raise ConfigError(f"unknown transport {name!r}; choose auto or one of {sorted(TRANSPORTS)}")
    row = TRANSPORTS[chosen]
    if row.package is not None and not is_installed(row.package):
        raise ConfigError(f"transport {chosen} needs {row.package}: {_install(row)}")
    if on_device and not row.kind.moves_devices:
        able = [known for known, other in TRANSPORTS.items() if other.kind.moves_devices]
        raise ConfigError(
            f"transport {chosen} serves no arena on a device; choose auto or one of {able}"
        )
    log = structlog.get_logger(__name__)
    log.info("transport_chosen", transport=chosen, reason=reason, agent=agent_name)
    transport = row.kind(agent_name, host)
    if name == "auto" and not same_host and not on_device:
        return NearAndFar(ShmTransport(agent_name), transport)
    return transport


def choose_transport(
    *, same_host: bool, is_installed: Callable[[str], bool], on_device: bool = False
) -> tuple[str, str]:
    """The transport that `auto` means beside shm, and why; `is_installed` knows packages."""
    if same_host and not on_device:
        return "shm", "peers are on this host: one copy, no network stack"
    missing: list[str] = []
    for name, row in TRANSPORTS.items():
        if row.package is None or (on_device and not row.kind.moves_devices):
            continue
        if is_installed(row.package):
            reason = "peers may be on other hosts; shm for those on this one"
            if on_device:
                reason = "the arena is on a device, which shm cannot reach"
            return name, "; ".join([reason, *missing])
        missing.append(f"{name} is not installed ({_install(row)})")
    raise ConfigError(f"no transport reaches other hosts: {'; '.join(missing)}")


def is_installed(package: str) -> bool:
    """True if `package` can be imported; does not import it."""
    return find_spec(package) is not None


def _install(row: TransportRow) -> str:
    return f"pip install 'tandem[{row.extra}]'" if row.extra else "pip install tandem"
