"""The table of transports, and which one `auto` means. Knows no transport's inside."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import structlog

from connector.transports.base import Transport
from connector.transports.nixl import NixlTransport
from connector.transports.shm import ShmTransport
from engine.errors import ConfigError

TRANSPORTS: Mapping[str, Callable[[str], Transport]] = MappingProxyType(
    {"shm": ShmTransport, "nixl": NixlTransport}
)


def open_transport(name: str, agent_name: str, *, same_host: bool = True) -> Transport:
    """A transport by name, or by `auto`: shm where all peers share this host's memory, else nixl.

    Raises ConfigError for an unknown name or a missing package.
    """
    log = structlog.get_logger(__name__)
    chosen = name
    reason = "configured"
    if name == "auto":
        chosen, reason = _auto(same_host)
    if chosen not in TRANSPORTS:
        raise ConfigError(f"unknown transport {name!r}; choose auto or one of {sorted(TRANSPORTS)}")
    log.info("transport_chosen", transport=chosen, reason=reason, agent=agent_name)
    return TRANSPORTS[chosen](agent_name)


def _auto(same_host: bool) -> tuple[str, str]:
    if same_host:
        return "shm", "peers are on this host: one copy, no network stack"
    return "nixl", "peers may be on other hosts"
