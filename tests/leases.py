"""Lease tables without a node."""

from collections.abc import Callable

from connector.pd.lease import LeaseTable
from connector.pd.lease_words import LeaseWords
from engine.arena import MARGIN_BYTES, ArenaMemory


def lease_table(duration_s: float, clock: Callable[[], float]) -> LeaseTable:
    """Its words lie in an arena that has nothing else."""
    return LeaseTable(duration_s, clock, LeaseWords(ArenaMemory(MARGIN_BYTES)))
