"""The table of transports, and which one `auto` means. Knows no transport's inside."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import structlog

from connector.transports.address import AUTO
from connector.transports.arena_transport import ArenaTransport
from connector.transports.auto import AutoTransport
from connector.transports.base import Transport
from connector.transports.cuda_ipc import CudaIpcTransport
from connector.transports.nixl import NixlTransport
from connector.transports.shm import ShmTransport
from connector.transports.ucx import UcxTransport
from connector.transports.zmq import ZmqTransport
from engine.distribution import how_to_install
from engine.errors import ConfigError

log = structlog.get_logger()

# The order in which `auto` tries those that are installed, after shm. zmq always is.
TRANSPORTS: Mapping[str, type[ArenaTransport[Any]]] = MappingProxyType(
    {
        "cuda_ipc": CudaIpcTransport,
        "nixl": NixlTransport,
        "ucx": UcxTransport,
        "zmq": ZmqTransport,
        "shm": ShmTransport,
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
    """A transport by name, or by `auto`: for each peer the first that reaches it.

    `same_host`: all peers are on this host, so that others are opened only where the first fails.
    `on_device`: the arena is not in host memory. `host`: where a transport listens that has to.
    Raises ConfigError for an unknown name, or a transport that cannot serve such an arena; the
    transport does so for a missing package.
    """
    if name != AUTO:
        return _open_one(name, agent_name, host, on_device=on_device)
    names, reason = choose_transports(on_device=on_device, is_installed=is_installed)
    log.info("transports_chosen", transports=names, reason=reason, agent=agent_name)
    kinds = {each: TRANSPORTS[each] for each in names}
    return AutoTransport(agent_name, host, kinds, at_start=1 if same_host else 2)


def _open_one(name: str, agent_name: str, host: str, *, on_device: bool) -> Transport:
    kind = TRANSPORTS.get(name)
    if kind is None:
        raise ConfigError(f"unknown transport {name!r}; choose auto or one of {sorted(TRANSPORTS)}")
    if on_device and not kind.moves_devices:
        able = [known for known, other in TRANSPORTS.items() if other.moves_devices]
        raise ConfigError(
            f"transport {name} serves no arena on a device; choose auto or one of {able}"
        )
    if not on_device and not kind.moves_hosts:
        raise ConfigError(f"transport {name} serves arenas on devices only; choose auto")
    opened = kind(agent_name, host)
    log.info("transport_chosen", transport=name, agent=agent_name)
    return opened


def choose_transports(
    *, is_installed: Callable[[str], bool], on_device: bool = False
) -> tuple[tuple[str, ...], str]:
    """The transports that `auto` means, the best first, and why; `is_installed` knows packages."""
    reasons = ["shm for peers that can share memory, others for the rest"]
    if on_device:
        reasons = ["cuda_ipc for peers that can share a device's memory, others for the rest"]
    able = [kind for kind in TRANSPORTS.values() if _suits(kind, on_device=on_device)]
    present = []
    for kind in able:
        if kind.package is None or is_installed(kind.package):
            present.append(kind.name)
        else:
            reasons.append(f"{kind.name} is not installed ({how_to_install(kind.name)})")
    # Where memory can be shared, nothing is faster: one copy and no network stack.
    present.sort(key=lambda name: name != ShmTransport.name)
    return tuple(present), "; ".join(reasons)


def _suits(kind: type[ArenaTransport[Any]], *, on_device: bool) -> bool:
    return kind.moves_devices if on_device else kind.moves_hosts


def is_installed(package: str) -> bool:
    """True if `package` can be imported; does not import it."""
    return find_spec(package) is not None
