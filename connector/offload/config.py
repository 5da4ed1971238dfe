"""`kv_connector_extra_config` of the OffloadConnector, decoded here and nowhere else."""

from typing import Annotated

from msgspec import Meta

from serving.config import Config, NotNegative, Seconds


class OffloadConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of the OffloadConnector; at least one tier is needed."""

    host_bytes: Annotated[
        NotNegative, Meta(description="Memory for what the arena evicts; 0: no host tier.")
    ] = 0
    disk_path: Annotated[
        str | None,
        Meta(
            description="Folder for what the host tier evicts, and early for states and shared "
            "prefixes; nodes may share it. Default: no disk tier."
        ),
    ] = None
    disk_bytes: Annotated[
        NotNegative, Meta(description="The most that all files of this format there may take.")
    ] = 0
    hybrid_chunk_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Tokens of one chunk in groups whose block size it divides; others go by "
            "whole blocks. Default: the largest part of a block up to 256."
        ),
    ] = None
    load_timeout_seconds: Annotated[
        Seconds, Meta(description="A load that takes longer is computed instead.")
    ] = 30.0
    flush_timeout_seconds: Annotated[
        Seconds, Meta(description="For writing what is not on disk yet when the node ends.")
    ] = 5.0
    verify: Annotated[
        bool,
        Meta(
            description="Compare files with the digests in them; `false` saves about a quarter of "
            "a load's time."
        ),
    ] = True
    # Twice a peer's, since no link and no peer is busy with it.
    load_weight: Annotated[
        float,
        Meta(
            gt=0.0,
            le=1e6,
            description="Under a MultiConnector: worth of a token from a tier beside one from "
            "another child.",
        ),
    ] = 2.0

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding reports as a ConfigError."""
        if not self.host_bytes and self.disk_path is None:
            raise ValueError("no tier: give host_bytes, or disk_path and disk_bytes")
        if (self.disk_path is None) != (not self.disk_bytes):
            raise ValueError("disk_path and disk_bytes go together: give both or none")
