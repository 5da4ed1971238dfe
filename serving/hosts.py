"""Addresses of this machine, and the one that peers on other hosts are told."""

import fcntl
import socket
import struct
from contextlib import suppress

import structlog

from engine.errors import ConfigError

WILDCARDS = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
# Addresses for documentation (RFC 5737, RFC 3849): nothing is ever sent there.
_ELSEWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}
_DISCARD_PORT = 9

log = structlog.get_logger()


def advertised_host(host: str, asked: str | None) -> str:
    """The host that peers are told: `asked` (`--advertise-host`), else `host` (`--host`).

    For a wildcard it is the address that leads out of this machine. Raises ConfigError when peers
    could not reach `asked`, and when nothing says which of several addresses is meant.
    """
    if asked is None:
        return _own_address(host) if host in WILDCARDS else host
    if asked in WILDCARDS:
        raise ConfigError(f"--advertise-host {asked} is no address that peers can connect to")
    told = addresses_here("--advertise-host", asked)
    if host not in WILDCARDS and not told & addresses_here("--host", host):
        raise ConfigError(
            f"--advertise-host {asked} is not where this node listens, --host {host}; "
            "listen there or on 0.0.0.0"
        )
    return asked


def ipv4_of(interface: str) -> str | None:
    """The IPv4 address of a network interface; None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            asked = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def addresses_here(flag: str, host: str) -> set[str]:
    """The addresses that `host` names. Raises ConfigError unless all are this machine's."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(
            f"{flag} {host!r} is neither an address nor a name that this machine knows: "
            f"{error.strerror}; {_choice()}"
        ) from error
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError as error:
                meant = f"{host} ({address[0]})" if address[0] != host else host
                raise ConfigError(
                    f"{flag} {meant} is not an address of this machine: {error.strerror}; "
                    f"{_choice()}"
                ) from error
    return {str(address[0]) for *_, address in found}


def _choice() -> str:
    return f"it has {', '.join([*_addresses_beyond_loopback(), LOOPBACK])}, and 0.0.0.0 means all"


def _own_address(host: str) -> str:
    """The address of the default route's interface, else the only address there is.

    The machine's own name does not help: on Debian it means 127.0.1.1.
    """
    families = (socket.AF_INET, socket.AF_INET6) if host == "::" else (socket.AF_INET,)
    for family in families:
        # This machine's address on the way out; connecting a datagram socket sends nothing.
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((_ELSEWHERE[family], _DISCARD_PORT))
            return str(probe.getsockname()[0])
    others = _addresses_beyond_loopback()
    if len(others) > 1:
        raise ConfigError(
            f"--host {host}: no default route says which of {', '.join(others)} peers can reach; "
            "choose one with --advertise-host"
        )
    if not others:
        log.warning(
            "peers on other hosts cannot reach this node: it has no network; "
            "when it has one, restart it or give --advertise-host",
            host=host,
            advertised=LOOPBACK,
        )
    return others[0] if others else LOOPBACK


def _addresses_beyond_loopback() -> list[str]:
    found = (ipv4_of(name) for _, name in socket.if_nameindex())
    return [address for address in found if address and not address.startswith("127.")]
