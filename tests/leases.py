"""Lease tables and a control service's identity without a node."""

from collections.abc import Callable

from connector.pd.prefill.lease_records import FreeRuns, LeaseRecords
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.wire.lease_record import REGION_BYTES
from connector.pd.wire.messages import Handshake

LEASE_S = 30.0
HOLDING = bytes(range(32))
"""What all of its leases hold, they say."""


def lease_table(duration_s: float, clock: Callable[[], float]) -> LeaseTable:
    return LeaseTable(
        duration_s, clock, LeaseRecords(memoryview(bytearray(REGION_BYTES)).cast("Q"))
    )


def num_free(runs: FreeRuns) -> int:
    """Places in all runs."""
    return sum(length for _, length in runs._runs)


def identity() -> Handshake:
    """Of a node called p."""
    return Handshake(
        engine_id="p",
        transport="shm",
        transport_address=b"",
        geometry={},
        lease_s=LEASE_S,
    )
