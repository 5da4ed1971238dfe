"""Lease tables and a control service's identity without a node."""

from collections.abc import Callable

from connector.pd.lease_records import LeaseRecords
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.wire.messages import Handshake
from engine.arena import MARGIN_BYTES, ArenaMemory

LEASE_S = 30.0
HOLDING = bytes(range(32))
"""What all of its leases hold, they say."""


def lease_table(duration_s: float, clock: Callable[[], float]) -> LeaseTable:
    """Its records lie in an arena that has nothing else."""
    return LeaseTable(duration_s, clock, LeaseRecords(ArenaMemory(MARGIN_BYTES)))


def identity(lease_records: int = 0) -> Handshake:
    """Of a node called p, whose lease records begin there in its arena."""
    return Handshake(
        engine_id="p",
        transport="shm",
        transport_address=b"",
        geometry={},
        lease_s=LEASE_S,
        lease_records=lease_records,
    )
