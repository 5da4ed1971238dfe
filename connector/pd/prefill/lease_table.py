"""Leases: finished requests that stay readable for peers until their lease ends.

Durations and an injected monotonic clock, never wall time (vLLM #41383). Thread-safe: control
messages arrive while the engine thread is in a long forward, and must count. Knows nothing of
tensors or sockets.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from connector.pd.prefill.held_digests import ArenaDigests, HeldDigests
from connector.pd.prefill.lease_records import LeaseRecord, LeaseRecords
from connector.pd.wire.messages import ANY_GENERATION, BlockIds
from engine.request import has_label

RENEWAL_SHARE = 2.0 / 3.0
MAX_HOLD_S = 3600.0
"""No peer keeps a lease for longer, however often it renews it: its pull has long failed."""


@dataclass(slots=True)
class Lease:
    """One held request: its blocks by group, its computed tokens, its end.

    `last_deadline`: no renewal leads beyond it. `is_spare`: kept for a next turn that may never
    come, and nobody has claimed it. `digests`: digests of its bytes, once a reader will come.
    """

    block_ids: BlockIds
    num_tokens: int
    deadline: float
    last_deadline: float
    record: LeaseRecord
    is_spare: bool = False
    digests: HeldDigests | None = None

    @property
    def generation(self) -> int:
        """New for every grant."""
        return self.record.generation


class LeaseTable:
    """Owner of all leases of one node. A lease ends once: by release, by running out, as spare.

    Its blocks are hashed from when a reader is sure to come: at once, or from the claim of a spare.
    `num_taken_back`: spare leases that ended because memory was short.
    """

    def __init__(
        self,
        duration_s: float,
        clock: Callable[[], float],
        records: LeaseRecords,
        *,
        digests: ArenaDigests,
    ) -> None:
        self.duration_s = duration_s
        self.num_expired = 0
        self.num_late_releases = 0
        self.num_taken_back = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._ended: list[str] = []
        self._records = records
        self._digests = digests

    def grant(
        self,
        request_id: str,
        block_ids: BlockIds,
        num_tokens: int,
        *,
        holding: bytes,
        spare_s: float | None = None,
    ) -> Lease:
        """Begins the lease of a finished request; a spare one lasts `spare_s` seconds unclaimed.

        `holding` tells readers what it holds (`params.holding_of`).
        """
        with self._lock:
            is_spare = spare_s is not None
            deadline = self._clock() + (self.duration_s if spare_s is None else spare_s)
            # One lease per request, and a record for each: the oldest end if there are too many.
            if request_id in self._leases:
                self._remove(request_id)
            while (record := self._records.begin(sum(map(len, block_ids)), holding)) is None:
                self._end(min(self._leases, key=lambda key: self._leases[key].deadline))
            lease = Lease(block_ids, num_tokens, deadline, deadline + MAX_HOLD_S, record, is_spare)
            self._leases[request_id] = lease
        if not is_spare:
            self._hash(lease)  # D may read at once
        return lease

    def claim(self, request_id: str) -> Lease | None:
        """The reader has accepted the request: the lease, renewed; None when there is none.

        From now on a spare lease is like any other: it lasts as long as its reader renews it.
        """
        with self._lock:
            lease = self._live(request_id)
            if lease is not None:
                lease.is_spare = False
                lease.deadline = min(lease.deadline, self._clock() + self.duration_s)
                self._extend(lease)
        if lease is not None:
            self._hash(lease)
        return lease

    def held(self, request_id: str, generation: int) -> Lease | None:
        """The lease of that generation; None when it is not alive."""
        with self._lock:
            return self._live(request_id, generation)

    def digests(self, request_id: str, generation: int) -> HeldDigests | None:
        """Digests of what the lease of that generation holds; None when it is not alive."""
        lease = self.held(request_id, generation)
        return None if lease is None else self._hash(lease)

    def renew(self, leases: Iterable[tuple[str, int]]) -> list[str]:
        """Extends leases by id and generation; returns the ids whose lease has ended."""
        lost = []
        with self._lock:
            for request_id, generation in leases:
                lease = self._live(request_id, generation)
                if lease is None:
                    lost.append(request_id)
                else:
                    self._extend(lease)
        return lost

    def release(self, request_id: str, generation: int = ANY_GENERATION) -> bool:
        """Ends a lease; whether it was still alive, so that a late reader learns it.

        A reader of another generation of the request learns that its own is gone, and ends nothing.
        Without a generation `request_id` may be the caller's own label; the answer is then False.
        """
        with self._lock:
            alive = self._live(request_id, generation) is not None
            ended = [request_id] if alive else []
            if not alive and generation == ANY_GENERATION:
                # A caller that left before P's answer came knows its own label only.
                ended = [key for key in self._leases if has_label(key, request_id)]
            for key in ended:
                self._end(key)
            self.num_late_releases += not ended
            return alive

    def take_back(self) -> str | None:
        """Ends the spare lease that has the least time left, if there is one; its request.

        Its blocks may be freed at once: nobody has learned where they lie.
        """
        with self._lock:
            spare = [(it.deadline, key) for key, it in self._leases.items() if it.is_spare]
            if not spare:
                return None
            _, request_id = min(spare)
            self._remove(request_id)
            self.num_taken_back += 1
            return request_id

    def take_ended(self) -> tuple[str, ...]:
        """Requests whose lease ended since the last call; their blocks may be freed."""
        with self._lock:
            for request_id in [key for key in self._leases if self._live(key) is None]:
                self._end(request_id)
                self.num_expired += 1
            ended, self._ended = tuple(self._ended), []
            return ended

    def close(self) -> None:
        """Readers see of every lease that it has ended; nothing else happens to blocks."""
        with self._lock:
            for request_id in list(self._leases):
                self._remove(request_id)

    def all_held(self) -> list[Lease]:
        """Every lease, also one that has run out and not been taken yet."""
        with self._lock:
            return list(self._leases.values())

    def next_deadline(self) -> float | None:
        with self._lock:
            return min((lease.deadline for lease in self._leases.values()), default=None)

    def _live(self, request_id: str, generation: int = ANY_GENERATION) -> Lease | None:
        lease = self._leases.get(request_id)
        if lease is None or self._clock() >= lease.deadline:
            return None
        return lease if generation in (ANY_GENERATION, lease.generation) else None

    def _hash(self, lease: Lease) -> HeldDigests:
        """Without the lock: long leases take their time."""
        if lease.digests is None:
            lease.digests = self._digests.begin(lease.block_ids, lease.num_tokens, lease.record.put)
        return lease.digests

    def _extend(self, lease: Lease) -> None:
        extended = self._clock() + RENEWAL_SHARE * self.duration_s
        lease.deadline = min(max(lease.deadline, extended), lease.last_deadline)

    def _end(self, request_id: str) -> None:
        self._remove(request_id)
        self._ended.append(request_id)

    def _remove(self, request_id: str) -> None:
        # Order: the record first, so that readers see the end before the blocks are used again.
        lease = self._leases.pop(request_id)
        lease.record.end()
        if lease.digests is not None:
            lease.digests.stop()
