"""How the one token of a cluster travels: as a bearer token in a call's metadata."""

from engine.errors import ConfigError


def bearer(token: str) -> str:
    """The metadata value for `token`. Raises `ConfigError` for what gRPC metadata cannot carry."""
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError("the cluster token must be printable ASCII, without line ends")
    return f"Bearer {token}"
