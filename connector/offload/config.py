"""`kv_connector_extra_config` of the OffloadConnector, decoded here and nowhere else."""

from typing import Annotated

from msgspec import Meta

from engine.config import Config, NotNegative, Seconds


class OffloadConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of the OffloadConnector.

    `host_bytes`: memory for what the arena evicts. `disk_path`: a folder, which several nodes may
    share, for what the host tier evicts, and early for states and shared prefixes; `disk_bytes`:
    the most that all files of this format there may take. At least one tier is needed.

    `hybrid_chunk_size`: tokens per chunk for groups whose block it divides; other groups go by
    whole blocks. Default: the largest part of a block of at most 256 tokens.
    `load_timeout_seconds`: a load that takes longer is computed instead. `flush_timeout_seconds`:
    for writing what is not on disk yet when the node ends. `verify`: compare what is read from
    files with the digests in them. `load_weight`: under a MultiConnector, what a token from a tier
    is worth beside others'; twice a peer's by default, since no link and no peer is busy with it.
    """

    host_bytes: NotNegative = 0
    disk_path: str | None = None
    disk_bytes: NotNegative = 0
    hybrid_chunk_size: Annotated[int, Meta(ge=1)] | None = None
    load_timeout_seconds: Seconds = 30.0
    flush_timeout_seconds: Seconds = 5.0
    verify: bool = True
    load_weight: Annotated[float, Meta(gt=0.0, le=1e6)] = 2.0

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding reports as a ConfigError."""
        if not self.host_bytes and self.disk_path is None:
            raise ValueError("no tier: give host_bytes, or disk_path and disk_bytes")
        if (self.disk_path is None) != (not self.disk_bytes):
            raise ValueError("disk_path and disk_bytes go together: give both or none")
