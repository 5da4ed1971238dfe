"""Names one life of one process."""

import secrets


def new_engine_id(name: str) -> str:
    """`name` and a random part: a restarted node is a new peer, whatever its name and port."""
    return f"{name}-{secrets.token_hex(8)}"
