"""P's side of a hand-over: hold a finished prefill under a lease, and name its blocks.

And D's side of the way back: hold a finished answer for the next turn, if the node is set up so.
"""

from dataclasses import dataclass

import msgspec

from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.wire.params import ParamsSigner, holding_of
from engine.kv_cache.arena_plan import ArenaPlan
from engine.request import Request
from engine.types import FinishReason, KVTransferParams


@dataclass(slots=True)
class AdvertisedAddress:
    """The address of this node's control service; `port` is set once the server is bound."""

    engine_id: str
    host: str
    port: int = 0


MAX_NAMED_BLOCKS = 4096
"""kv_transfer_params travel through clients, so longer lists are left out and D asks P for them."""
ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class Producer:
    """Holds requests that another node goes on with.

    These are prefills for a decode node, and what was decoded here after a remote prefill: the
    latter for `turn_ttl_s` seconds (None: not at all).
    """

    def __init__(
        self,
        address: AdvertisedAddress,
        plan: ArenaPlan,
        leases: LeaseTable,
        *,
        signer: ParamsSigner,
        turn_ttl_s: float | None = None,
    ) -> None:
        self._address = address
        self._plan = plan
        self._leases = leases
        self._signer = signer
        self._turn_ttl_s = turn_ttl_s

    @property
    def num_held_bytes(self) -> int:
        """Bytes that leases keep in use; a block that several leases hold counts once for each."""
        return sum(
            self._plan.block_bytes(group) * len(blocks)
            for lease in self._leases.all_held()
            for group, blocks in enumerate(lease.block_ids)
        )

    def hold(self, request: Request) -> KVTransferParams | None:
        """Holds a finished request that another node goes on with; its signed object.

        None: nobody goes on with it. A request that ended with its first token was never pulled and
        has no blocks.
        """
        asked, tables, spare_s = request.kv_transfer_params, request.blocks, None
        if asked is None or request.finish_reason not in ENDED_WELL or tables is None:
            return None
        if not asked.do_remote_decode:
            spare_s = self._turn_ttl_s
            if spare_s is None or not asked.first_token_ids:
                return None
        # The last token was sampled and never computed: K/V and states end right before it.
        num_tokens = request.num_computed_tokens
        digest = request.prefix.digest_at(num_tokens).hex()
        blocks = tuple(tuple(tables.used(group)) for group in range(len(tables.groups)))
        filled_from = [0] * len(blocks)
        for group, table in tables.attention.items():
            if table.filled_from > table.num_passed * self._plan.block_size_of(group):
                filled_from[group] = table.filled_from
        holding = holding_of(digest, blocks)
        lease = self._leases.grant(
            request.request_id, blocks, num_tokens, holding=holding, spare_s=spare_s
        )
        params = KVTransferParams(
            do_remote_decode=True,
            remote_engine_id=self._address.engine_id,
            remote_request_id=request.request_id,
            remote_block_ids=blocks if sum(map(len, blocks)) <= MAX_NAMED_BLOCKS else None,
            remote_filled_from=tuple(filled_from) if any(filled_from) else None,
            remote_host=self._address.host,
            remote_port=self._address.port,
            remote_num_tokens=num_tokens,
            remote_prompt_digest=digest,
            tp_size=1,
            remote_num_cached_tokens=request.num_cached_tokens,
        )
        if asked.do_remote_decode:
            # D goes on from the token that was sampled here.
            params = msgspec.structs.replace(
                params,
                do_remote_decode=False,
                do_remote_prefill=True,
                remote_generation=lease.generation,
                first_token_ids=(request.token_ids[-1],),
                first_token_logprobs=(request.last_logprob,) if request.last_logprob else None,
            )
        return self._signer.sign(params)
