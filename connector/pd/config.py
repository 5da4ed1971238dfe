"""`kv_connector_extra_config` of the PdConnector, decoded here and nowhere else."""

from typing import Annotated, Literal

from msgspec import Meta

from engine.config import Config, NotNegative, Seconds

PULLS_PER_PEER = 4


class PdConnectorConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of the PdConnector.

    `kv_lease_duration`: seconds for which P keeps a finished prefill; a renewal extends it by two
    thirds of that (vLLM #41383). `max_concurrent_pulls` bounds the pulls of a node that run at
    once, `max_concurrent_pulls_per_peer` those from one prefill node (default: 4, or the node's
    bound if that is less), `max_waiting_pulls` those that wait for their turn: one more is computed
    here or fails, as `kv_load_failure_policy` says. `transfer_timeout` bounds one read,
    `control_timeout` one control message, both in seconds.
    `verify_transfers`: compare what was read with P's digests before anybody may use it.

    `bidirectional_kv_xfer`: what was decoded here after a remote prefill is kept for the next turn,
    and what a decode node keeps is pulled (vLLM's names). Only for callers that send the last
    answer's `kv_transfer_params` back with the next turn. `decoder_kv_blocks_ttl`: seconds for
    which a finished request is kept; it pins its blocks and states, so size the arena for the
    turns that end in that time. When memory is short, those that nobody has claimed go first, the
    oldest first. `kv_recompute_threshold`: a pull that would save P fewer tokens is not made.

    `load_weight`: under a MultiConnector, what a token from a peer is worth beside others'.
    """

    transport: Literal["auto", "shm", "nixl", "ucx", "zmq"] = "auto"
    kv_lease_duration: Seconds = 30.0
    max_concurrent_pulls: Annotated[int, Meta(ge=1, le=64)] = 16
    max_concurrent_pulls_per_peer: Annotated[int, Meta(ge=1, le=64)] | None = None
    max_waiting_pulls: Annotated[int, Meta(ge=1, le=65_536)] = 1024
    transfer_timeout: Seconds = 20.0
    control_timeout: Seconds = 5.0
    verify_transfers: bool = True
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: Seconds = 480.0
    kv_recompute_threshold: NotNegative = 64
    load_weight: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0

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
        """Pulls from one prefill node that may run at once."""
        return self.max_concurrent_pulls_per_peer or min(PULLS_PER_PEER, self.max_concurrent_pulls)
