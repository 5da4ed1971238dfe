"""P's side of the control plane: answers questions of peers about this node's arena and leases.

Answers from the lease table alone, never from the engine thread, so a long forward delays nobody.
Knows nothing of gRPC; `connector/pd/prefill/control_service.py` serves it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.wire.messages import BlockRange, Digests, Handshake, HeldBlocks
from engine.errors import KVTransferParamsError

_Held = TypeVar("_Held")


class ControlHandler:
    """Answers handshakes, claims, renewals, releases and questions about bytes, in any thread.

    `handshake` describes this node as it is now: its name, the address of its memory, which may
    change, and the geometry of its blocks, whose model is known once it serves. It may be given the
    transports by which a peer could read, where none in the last address led here. `wake` tells the
    engine that a lease has ended.
    """

    def __init__(
        self,
        engine_id: str,
        handshake: Callable[..., Handshake],
        leases: LeaseTable,
        *,
        wake: Callable[[], None],
    ) -> None:
        self._engine_id = engine_id
        self.handshake = handshake
        self._leases = leases
        self._wake = wake

    def claim(self, engine_id: str, request_id: str) -> HeldBlocks:
        """The places of the blocks of a held request; renews its lease, which no longer is spare.

        Raises KVTransferParamsError when this is another incarnation or the lease has ended.
        """
        self._check_incarnation(engine_id)
        lease = self._still(request_id, self._leases.claim(request_id))
        return HeldBlocks(
            num_tokens=lease.num_tokens, block_ids=lease.block_ids, generation=lease.generation
        )

    def digests(
        self,
        engine_id: str,
        request_id: str,
        generation: int,
        *,
        ranges: Sequence[BlockRange],
        left: threading.Event,
    ) -> Digests:
        """Digests of a held prefill, block by block of each range, until the caller has `left`.

        It is still held when they are all known. Raises KVTransferParamsError as `claim` does, and
        TransportError for ranges that are not held.
        """
        self._check_incarnation(engine_id)
        held = self._still(request_id, self._leases.digests(request_id, generation))
        digests = held.of(ranges, left)
        self._still(request_id, self._leases.held(request_id, generation))
        return digests

    def renew(
        self, engine_id: str, request_ids: Sequence[str], generations: Sequence[int]
    ) -> Sequence[str]:
        """Extends leases, all that one peer holds here at once; returns those that are lost."""
        self._check_incarnation(engine_id)
        if len(generations) != len(request_ids):
            raise KVTransferParamsError(
                f"{len(generations)} generations given for {len(request_ids)} requests"
            )
        return self._leases.renew(zip(request_ids, generations, strict=True))

    def release(self, engine_id: str, request_id: str, reason: str, *, generation: int) -> bool:
        """Ends a lease; whether it was alive. Who left before P's answer may give its own label."""
        self._check_incarnation(engine_id)
        was_alive = self._leases.release(request_id, generation)
        self._wake()
        return was_alive

    def _still(self, request_id: str, held: _Held | None) -> _Held:
        if held is None:
            raise KVTransferParamsError(
                f"{request_id!r} is not held here: its lease ran out or it was released; "
                "prefill it again",
                code="expired_kv_transfer_params",
            )
        return held

    def _check_incarnation(self, engine_id: str) -> None:
        if engine_id != self._engine_id:
            raise KVTransferParamsError(
                f"this is {self._engine_id}, not {engine_id}; that node is gone",
                code="foreign_kv_transfer_params",
            )
