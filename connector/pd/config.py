"""`kv_connector_extra_config` of the PdConnector, decoded here and nowhere else."""

from typing import Annotated, Literal

from msgspec import Meta

from serving.config import Config, NotNegative, Seconds

PULLS_PER_PEER = 4


class PdConnectorConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of the PdConnector; names are vLLM's where it has the option.

    What happens at each limit: docs/operations.md, "Limits of a hand-over".
    """

    transport: Annotated[
        Literal["auto", "shm", "cuda_ipc", "nixl", "ucx", "zmq"],
        Meta(description="What moves the bytes."),
    ] = "auto"
    # Renewed by two thirds of it, as in vLLM #41383.
    kv_lease_duration: Annotated[
        Seconds,
        Meta(description="Seconds for which P keeps a finished prefill that nobody renews."),
    ] = 30.0
    max_concurrent_pulls: Annotated[
        int, Meta(ge=1, le=64, description="Pulls of this node that run at once.")
    ] = 16
    max_concurrent_pulls_per_peer: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(
            description="Of these, from one prefill node. Default: 4, or max_concurrent_pulls if "
            "that is less."
        ),
    ] = None
    max_waiting_pulls: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="Pulls that wait for their turn; one more is treated as a failed pull.",
        ),
    ] = 1024
    transfer_timeout: Annotated[
        Seconds, Meta(description="Seconds that one pull may take once its turn has come.")
    ] = 20.0
    control_timeout: Annotated[
        Seconds, Meta(description="Seconds that one message to a peer may take.")
    ] = 5.0
    verify_transfers: Annotated[
        bool, Meta(description="Compare what was read with P's digests before anybody may use it.")
    ] = True
    bidirectional_kv_xfer: Annotated[
        bool,
        Meta(
            description="D keeps finished answers for the next turn, and P pulls them. For callers "
            "that send an answer's `kv_transfer_params` back with the next turn."
        ),
    ] = False
    decoder_kv_blocks_ttl: Annotated[
        Seconds,
        Meta(
            description="Seconds for which D keeps a finished answer. It pins blocks and states: "
            "size the arena for the turns that end in that time."
        ),
    ] = 480.0
    kv_recompute_threshold: Annotated[
        NotNegative, Meta(description="A pull from D that would save P fewer tokens is not made.")
    ] = 64
    load_weight: Annotated[
        float,
        Meta(
            gt=0.0,
            le=1e6,
            description="Under a MultiConnector: worth of a token from a peer beside one from "
            "another child.",
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding reports as a ConfigError."""
        asked = self.max_concurrent_pulls_per_peer
        if asked is not None and asked > self.max_concurrent_pulls:
            raise ValueError(
                f"max_concurrent_pulls_per_peer {asked} is more than max_concurrent_pulls "
                f"{self.max_concurrent_pulls}; lower the one or raise the other"
            )

    @property
    def turn_ttl_s(self) -> float | None:
        """Seconds for which a finished answer is kept for the next turn; None: not at all."""
        return self.decoder_kv_blocks_ttl if self.bidirectional_kv_xfer else None

    @property
    def pulls_per_peer(self) -> int:
        return self.max_concurrent_pulls_per_peer or min(PULLS_PER_PEER, self.max_concurrent_pulls)
