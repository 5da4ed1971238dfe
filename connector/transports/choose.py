"""The table of transports, and which one `auto` means. Knows no transport's inside."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import structlog

from connector.transports.arena_transport import ArenaTransport
from connector.transports.base import Transport
from connector.transports.near_and_far import NearAndFar
from connector.transports.nixl import NixlTransport
from connector.transports.shm import ShmTransport
from connector.transports.ucx import UcxTransport
from connector.transports.zmq import ZmqTransport
from engine.distribution import how_to_install
from engine.errors import ConfigError

# Across hosts `auto` takes the first that is installed. zmq always is, so never shm.
TRANSPORTS: Mapping[str, type[ArenaTransport[Any]]] = MappingProxyType(
    {"nixl": NixlTransport, "ucx": UcxTransport, "zmq": ZmqTransport, "shm": ShmTransport}
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
    where a transport listens that has to. Raises ConfigError for an unknown name, or a transport
    that cannot serve such an arena; the transport does so for a missing package.
    """
    chosen, reason = name, "configured"
    if name == "auto":
        chosen, reason = choose_transport(
            same_host=same_host, on_device=on_device, is_installed=is_installed
        )
    kind = TRANSPORTS.get(chosen)
    if kind is None:
        raise ConfigError(f"unknown transport {name!r}; choose auto or one of {sorted(TRANSPORTS)}")
    if on_device and not kind.moves_devices:
        able = [known for known, other in TRANSPORTS.items() if other.moves_devices]
        raise ConfigError(
            f"transport {chosen} serves no arena on a device; choose auto or one of {able}"
        )
    log = structlog.get_logger(__name__)
    log.info("transport_chosen", transport=chosen, reason=reason, agent=agent_name)
    transport = kind(agent_name, host)
    if name == "auto" and not same_host and not on_device:
        return NearAndFar(ShmTransport(agent_name), transport)
    return transport


def choose_transport(
    *, same_host: bool, is_installed: Callable[[str], bool], on_device: bool = False
) -> tuple[str, str]:
    """The transport that `auto` means beside shm, and why; `is_installed` knows packages."""
    if same_host and not on_device:
        return "shm", "peers are on this host: one copy, no network stack"
    reasons = ["peers may be on other hosts; shm for those on this one"]
    if on_device:
        reasons = ["the arena is on a device, which shm cannot reach"]
    able = [kind for kind in TRANSPORTS.values() if kind.moves_devices or not on_device]
    present = [kind.package is None or is_installed(kind.package) for kind in able]
    for kind in able[: present.index(True)]:
        reasons.append(f"{kind.name} is not installed ({how_to_install(kind.name)})")
    return able[present.index(True)].name, "; ".join(reasons)


def is_installed(package: str) -> bool:
    """True if `package` can be imported; does not import it."""
    return find_spec(package) is not None
