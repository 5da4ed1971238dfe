"""P's side of a hand-over: hold a finished prefill under a lease, and say where it is.

And D's side of the way back: hold a finished answer for the next turn, if the node is told to.
"""

from dataclasses import dataclass

import msgspec

from connector.pd.prefill.arena_digests import ArenaDigests
from connector.pd.prefill.lease_table import Lease, LeaseTable
from connector.pd.wire.params import ParamsSigner, holding_of, prompt_digest
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.tables import BlockTables
from engine.request import Request
from engine.types import FinishReason, KVTransferParams


@dataclass(slots=True)
class AdvertisedAddress:
    """Where peers reach this node's control service; `port` is set once the server is bound."""

    engine_id: str
    host: str
    port: int = 0


MAX_NAMED_BLOCKS = 4096
"""kv_transfer_params travel through clients, so longer lists are left out and D asks P for them."""
ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class Producer:
    """Keeps the blocks of requests that another node goes on with.

    Those that it will decode, and those of a remote prefill that ended here, for `turn_ttl_s`
    seconds (None: not at all).
    """

    def __init__(
        self,
        address: AdvertisedAddress,
        plan: ArenaPlan,
        leases: LeaseTable,
        *,
        digests: ArenaDigests,
        signer: ParamsSigner,
        turn_ttl_s: float | None = None,
    ) -> None:
        self._address = address
        self._plan = plan
        self._leases = leases
        self._digests = digests
        self._signer = signer
        self._turn_ttl_s = turn_ttl_s

    @property
    def num_held_bytes(self) -> int:
        """Bytes that leases keep in use; a block that several leases hold counts once for each."""
        return sum(
            self._plan.block_bytes(group) * len(offsets)
            for lease in self._leases.all_held()
            for group, offsets in enumerate(lease.offsets)
        )

    def hold(self, request: Request) -> KVTransferParams | None:
        """Holds what another node goes on with until the lease ends, and says where it is.

        A request that ended with its first token was never pulled and has no blocks.
        """
        params, tables, spare_s = request.kv_transfer_params, request.blocks, None
        if params is None or request.finish_reason not in ENDED_WELL or tables is None:
            return None
        if not params.do_remote_decode:
            spare_s = self._turn_ttl_s
            if spare_s is None or not params.first_token_ids:
                return None
        digest = prompt_digest(request.token_ids[: request.num_computed_tokens])
        lease = self._grant(request, tables, digest, spare_s=spare_s)
        params = self._params(request, tables, digest)
        if spare_s is None:
            params = _for_decode(params, request, lease)
            self._digests.begin(lease)
        return self._signer.sign(params)

    def _grant(
        self, request: Request, tables: BlockTables, digest: str, *, spare_s: float | None
    ) -> Lease:
        offsets = tuple(
            tuple(self._plan.block_offset(group, block) for block in tables.used(group))
            for group in range(len(tables.groups))
        )
        return self._leases.grant(
            request.request_id,
            offsets,
            request.num_computed_tokens,
            holding=holding_of(digest, offsets),
            spare_s=spare_s,
        )

    def _params(self, request: Request, tables: BlockTables, digest: str) -> KVTransferParams:
        """The last token was sampled and never computed: K/V and states end right before it."""
        return KVTransferParams(
            do_remote_decode=True,
            remote_engine_id=self._address.engine_id,
            remote_request_id=request.request_id,
            remote_block_ids=_named(tables),
            remote_host=self._address.host,
            remote_port=self._address.port,
            remote_num_tokens=request.num_computed_tokens,
            remote_prompt_digest=digest,
            tp_size=1,
            remote_num_cached_tokens=request.num_cached_tokens,
        )


def _named(tables: BlockTables) -> tuple[tuple[int, ...], ...] | None:
    blocks = tuple(tuple(tables.used(group)) for group in range(len(tables.groups)))
    return blocks if sum(map(len, blocks)) <= MAX_NAMED_BLOCKS else None


def _for_decode(params: KVTransferParams, request: Request, lease: Lease) -> KVTransferParams:
    """D goes on from the token that was sampled here, and may read what `lease` holds at once."""
    return msgspec.structs.replace(
        params,
        do_remote_decode=False,
        do_remote_prefill=True,
        remote_generation=lease.generation,
        first_token_ids=(request.token_ids[-1],),
        first_token_logprobs=(request.last_logprob,) if request.last_logprob else None,
    )
