"""Lease tables and a control service's identity without a node."""

from collections.abc import Callable, Sequence

from connector.pd.layout import SequenceBlocks
from connector.pd.prefill.held_digests import ArenaDigests, HeldDigests, PutDigest
from connector.pd.prefill.lease_records import FreeRuns, LeaseRecords
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.wire.lease_record import REGION_BYTES
from connector.pd.wire.messages import BlockIds, Handshake

LEASE_S = 30.0
HOLDING = bytes(range(32))
"""The `holding` that tests name for all of their leases."""


class NoDigests(ArenaDigests):
    """For leases that nobody asks for digests."""

    def __init__(self) -> None:
        pass

    def begin(self, block_ids: BlockIds, num_tokens: int, put: PutDigest) -> HeldDigests:
        """Nothing is hashed."""
        return HeldDigests(SequenceBlocks(()), lambda blocks: [0] * len(blocks), put)


NO_DIGESTS = NoDigests()


def lease_table(duration_s: float, clock: Callable[[], float]) -> LeaseTable:
    records = LeaseRecords(memoryview(bytearray(REGION_BYTES)).cast("Q"))
    return LeaseTable(duration_s, clock, records, digests=NO_DIGESTS)


def num_free(runs: FreeRuns) -> int:
    """The number of free places in all runs."""
    return sum(length for _, length in runs._runs)


def identity(wanted: Sequence[str] = ()) -> Handshake:
    """The handshake of a node called p."""
    return Handshake(
        engine_id="p",
        transport="shm",
        transport_address=b"",
        geometry={},
        lease_s=LEASE_S,
    )
