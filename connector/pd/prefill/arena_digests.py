"""P hashes what a reader will compare, on a thread of its own, before the reader has come.

Between P's answer and the end of the read lie a proxy, D's queue, one of its steps and the read; D
has to ask only for what is not hashed by then, or cut differently. Knows no cuts but P's own.
"""

import time
from concurrent.futures import ThreadPoolExecutor

from connector.pd.digest import ReadBytes, step_back
from connector.pd.layout import blocks_announced
from connector.pd.prefill.held_digests import HeldDigests
from connector.pd.prefill.lease_table import Lease
from connector.pd.wire.geometry import geometry_of
from engine.kv_cache.plan import ArenaPlan

ANSWER_S = 0.003
"""The answer that names the blocks goes out first; no reader comes before it."""


class ArenaDigests:
    """Owner of the thread. Each lease is one job on it, which ends with the lease."""

    def __init__(self, plan: ArenaPlan, read: ReadBytes) -> None:
        self._plan = plan
        self._geometry = geometry_of(plan)
        self._read = read
        self._thread = ThreadPoolExecutor(1, "kv-digests", initializer=step_back)

    def begin(self, lease: Lease) -> HeldDigests:
        """Hash what `lease` holds, once, as a reader has come or will come for it."""
        if lease.digests is None:
            held = blocks_announced(
                self._plan, self._geometry, lease.block_ids, num_tokens=lease.num_tokens
            )
            lease.digests = HeldDigests(held, self._read, lease.record.put)
            self._thread.submit(lease.digests.hash_ahead, time.monotonic() + ANSWER_S)
        return lease.digests

    def close(self) -> None:
        """Returns when the thread has ended; call before the arena is freed."""
        self._thread.shutdown(wait=True, cancel_futures=True)
