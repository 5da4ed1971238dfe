"""Certificates and keys from files, read and checked at start; for HTTP and for gRPC."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError


@dataclass(slots=True, frozen=True)
class ServerTls:
    """A server's certificate and key: as files for HTTP, as PEM for gRPC."""

    certfile: str
    keyfile: str
    certificate: bytes
    key: bytes


@dataclass(slots=True, frozen=True)
class ClientTls:
    """A client's authorities: `context` verifies HTTP servers, `authorities` (PEM) gRPC servers.

    None stands for the authorities that gRPC brings along.
    """

    context: ssl.SSLContext
    authorities: bytes | None


def server_tls(certfile: str | None, keyfile: str | None) -> ServerTls | None:
    """None without files. Raises ConfigError for one file alone or an unusable one."""
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise ConfigError("give both --ssl-certfile and --ssl-keyfile, or neither")
    certificate = _read("--ssl-certfile", certfile)
    key = _read("--ssl-keyfile", keyfile)
    try:
        # The password: without one OpenSSL would ask at the terminal for that of a locked key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="none")
    except ssl.SSLError as error:
        raise ConfigError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} must be a certificate and its "
            f"unlocked key, both PEM: {error}"
        ) from error
    return ServerTls(certfile, keyfile, certificate, key)


def client_tls(ca_certs: str | None) -> ClientTls:
    """Trusts the authorities in `ca_certs`, or the machine's. Raises ConfigError for a bad file."""
    if ca_certs is None:
        return ClientTls(ssl.create_default_context(), None)
    authorities = _read("--ssl-ca-certs", ca_certs)
    try:
        return ClientTls(ssl.create_default_context(cafile=ca_certs), authorities)
    except ssl.SSLError as error:
        raise ConfigError(
            f"--ssl-ca-certs {ca_certs} must hold PEM certificates: {error}"
        ) from error


def _read(flag: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from error
