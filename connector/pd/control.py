"""P's side of the control plane: what peers may ask about this node's arena and leases.

Answers from the lease table alone, never from the engine thread, so a long forward delays nobody.
Knows nothing of gRPC; `engine/rpc/control_service.py` serves it.
"""

from collections.abc import Callable, Sequence

from connector.pd.lease import LeaseTable
from engine.errors import KVTransferParamsError
from engine.rpc.messages import Claim, Handshake


class LeaseDesk:
    """Answers handshakes, claims, renewals and releases; `wake` tells the engine."""

    def __init__(self, identity: Handshake, leases: LeaseTable, wake: Callable[[], None]) -> None:
        self._identity = identity
        self._leases = leases
        self._wake = wake

    def handshake(self, caller_engine_id: str) -> Handshake:
        """Who this node is, how its arena is reached and what its blocks look like."""
        return self._identity

    def claim(self, engine_id: str, request_id: str, caller_engine_id: str) -> Claim:
        """Where the blocks of a held prefill lie; renews its lease.

        Raises KVTransferParamsError when this is another incarnation or the lease has ended.
        """
        self._check_incarnation(engine_id)
        lease = self._leases.claim(request_id)
        if lease is None:
            raise KVTransferParamsError(
                f"the prefill {request_id!r} is not held any more: its lease of "
                f"{self._leases.duration_s:g} s ran out or it was released; prefill it again",
                code="expired_kv_transfer_params",
            )
        return Claim(
            num_tokens=lease.num_tokens, groups=lease.offsets, lease_s=self._leases.duration_s
        )

    def renew(
        self, engine_id: str, caller_engine_id: str, request_ids: Sequence[str]
    ) -> Sequence[str]:
        """Extends leases, all that one peer holds here at once; returns those that are lost."""
        self._check_incarnation(engine_id)
        return self._leases.renew(request_ids)

    def release(self, engine_id: str, request_id: str, reason: str) -> bool:
        """Ends a lease and says whether it was still alive: the reader's confirmation.

        A caller that left too early to learn P's id may give its own label; that confirms nothing.
        """
        self._check_incarnation(engine_id)
        was_alive = self._leases.release(request_id)
        if not was_alive:
            self._leases.release_unheard(request_id)
        self._wake()
        return was_alive

    def _check_incarnation(self, engine_id: str) -> None:
        if engine_id != self._identity.engine_id:
            raise KVTransferParamsError(
                f"this is {self._identity.engine_id}, not {engine_id}; that node is gone",
                code="foreign_kv_transfer_params",
            )
