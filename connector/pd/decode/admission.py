"""Judges `kv_transfer_params` before anything is reserved, then claims what they name.

Runs on the event loop, as do the calls to peers.
"""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from connector.pd import causes
from connector.pd.config import PdConnectorConfig
from connector.pd.decode.remote_prefills import RemotePrefill, RemotePrefills
from connector.pd.metrics import TransferMetrics
from connector.pd.wire.params import (
    ParamsSigner,
    check_details,
    check_remote_prefill,
    check_return_pull,
    first_token_of,
    why_not_from,
)
from engine.errors import KVLoadError, KVTransferParamsError, TandemError, TransportError
from engine.kv_cache.prefix import PrefixHasher
from engine.kv_connector import AdmissionConnector, Admitted
from engine.types import GenerateRequest, HandOverProblem, KVTransferParams
from serving.config import KVTransferConfig
from serving.node.connector import NodeParts

log = structlog.get_logger()

# A return pull comes with do_remote_decode: a node that may produce may start from what D keeps.
REFUSED_BY_ROLE = {"kv_consumer": "do_remote_decode", "kv_producer": "do_remote_prefill"}
Question = Callable[[RemotePrefill], asyncio.Task[None] | None]
FAILED_PREFILL = KVTransferParams(do_remote_prefill=True)
"""Replaces an object of which nothing may be used, so that its loss is still counted."""


class PdAdmission(AdmissionConnector):
    """Accepts remote decodes when this node may produce, remote prefills when it may consume."""

    def __init__(
        self,
        signer: ParamsSigner,
        remote: RemotePrefills,
        node: NodeParts,
        *,
        config: KVTransferConfig,
        extra: PdConnectorConfig,
        metrics: TransferMetrics,
    ) -> None:
        self._signer = signer
        self._remote = remote
        self._config = config
        self._hasher = PrefixHasher(1, node.prefix_hash_seed)  # of whole prompts only
        self._vocab_size = node.vocab_size
        self._is_bidirectional = extra.bidirectional_kv_xfer
        self._metrics = metrics
        # At most a proof, a handshake and the claim.
        self._timeout_s = 3 * extra.control_timeout

    async def admit(self, request: GenerateRequest) -> Admitted:
        """Claims the remote prefill or the turn before, if `request` names one.

        Raises KVTransferParamsError for parameters that are partial, not signed by a node of this
        cluster or not for this node, and KVLoadError when the policy is `fail` and P does not hold
        the prefill or cannot be asked. Under `recompute` the prompt is computed here; P's first
        token is still used, unless P does not fit: then it is another model's.

        A turn before that cannot be had is skipped, whatever the policy: nobody promised it. The
        skip is counted by cause, and D need not keep the turn.
        """
        params = request.kv_transfer_params
        if params is None:
            return Admitted(request)
        check_details(params)
        first_token = first_token_of(params, self._vocab_size)
        refused = REFUSED_BY_ROLE.get(self._config.kv_role)
        if refused is not None and getattr(params, refused):
            raise KVTransferParamsError(
                f"this node's kv_role is {self._config.kv_role}: it refuses {refused}"
            )
        if params.do_remote_prefill:
            if await self._claim_prefill(request, params):
                return Admitted(request, first_token)
            return Admitted(msgspec.structs.replace(request, kv_transfer_params=FAILED_PREFILL))
        if params.is_return_pull:
            await self._claim_turn(request, params)
        if not params.do_remote_decode:
            return Admitted(request)
        # Another node decodes: this one computes what there is and samples one token.
        num_tokens = len(request.output_token_ids) + 1
        sampling = msgspec.structs.replace(request.sampling, max_tokens=num_tokens)
        return Admitted(msgspec.structs.replace(request, sampling=sampling))

    def problems(self) -> tuple[HandOverProblem, ...]:
        return self._remote.problems.present()

    def withdraw(self, request_id: str) -> None:
        self._remote.end(request_id)

    async def _claim_prefill(self, request: GenerateRequest, params: KVTransferParams) -> bool:
        """True if P's answer may be used, if only its first token."""
        check_remote_prefill(request, params)
        try:
            self._signer.verify(params)
        except KVTransferParamsError as error:
            # Anybody may have made this object up: no peer is held responsible.
            self._metrics.hand_over_failures("refused").inc()
            self._remote.problems.note("refused", str(error))
            raise
        prefill = RemotePrefill(request.request_id, params)
        digest = self._hasher.digest(request.token_ids, request.cache_salt)
        if digest.hex() == params.remote_prompt_digest:
            failure = await self._ask(prefill, self._remote.claim)
        else:
            failure = await self._why_digests_differ(prefill)
        if failure is None:
            return True
        self._remote.failed(prefill, causes.of_question(failure), failure)
        if self._config.kv_load_failure_policy != "recompute":
            self.withdraw(request.request_id)
            raise KVLoadError(f"the remote prefill cannot be loaded: {failure}") from failure
        return not isinstance(failure, TransportError)

    async def _claim_turn(self, request: GenerateRequest, params: KVTransferParams) -> None:
        check_return_pull(params)
        self._signer.verify(params)
        is_on = self._is_bidirectional
        cause = why_not_from(request, params, self._hasher) if is_on else "disabled"
        prefill = RemotePrefill(request.request_id, params)
        if cause is not None:
            self._remote.decline(prefill)
        elif failure := await self._ask(prefill, self._remote.claim):
            cause = causes.of_question(failure)
            log.info("the turn before cannot be pulled", cause=cause, error=str(failure))
            self.withdraw(request.request_id)
        if cause is not None:
            self._metrics.return_pulls_skipped(cause).inc()

    async def _why_digests_differ(self, prefill: RemotePrefill) -> TransportError:
        """The peer does not fit: with another seed all its digests differ.

        Raises KVTransferParamsError if it fits: then it has computed something else.
        """
        failure = await self._ask(prefill, self._remote.check)
        if isinstance(failure, TransportError):
            return failure
        self.withdraw(prefill.request_id)
        raise KVTransferParamsError(
            "P computed another prompt of the same length, or under another cache_salt; send the "
            "same prompt and cache_salt to both",
            code="mismatched_kv_transfer_params",
        )

    async def _ask(self, prefill: RemotePrefill, question: Question) -> Exception | None:
        """The failure, if the peer did not agree. A cancelled request is withdrawn."""
        try:
            asked = question(prefill)
            if asked is not None:
                # Shielded: who has left is found once the peer has answered, and then it is told.
                await asyncio.wait_for(asyncio.shield(asked), self._timeout_s)
        except (TandemError, TimeoutError) as error:
            return error  # the client never sees it: this node can compute all tokens itself
        except BaseException:
            self.withdraw(prefill.request_id)
            raise
        return None
