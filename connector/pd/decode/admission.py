"""Judges `kv_transfer_params` at the door: typed errors before anything is reserved, claims after.

Runs on the event loop; what blocks happens on the claim keeper's threads.
"""

import asyncio

import msgspec
import structlog

from connector.pd import causes
from connector.pd.config import PdConnectorConfig
from connector.pd.decode.remote_prefills import PrefillClaim, RemotePrefills
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
from engine.kv_connector import AdmissionConnector, Admitted
from engine.node.connector import ConnectorSettings
from engine.types import GenerateRequest, HandOverProblem, KVTransferParams

log = structlog.get_logger()

# A return pull comes with do_remote_decode: who may produce may start from what D keeps.
REFUSED_BY_ROLE = {"kv_consumer": "do_remote_decode", "kv_producer": "do_remote_prefill"}
FAILURES = (TandemError, TimeoutError)
"""Of a question to a peer: none is the client's fault, and this node can compute every token."""
FAILED_PREFILL = KVTransferParams(do_remote_prefill=True)
"""There was one, and nothing of it may be used."""


class PdAdmission(AdmissionConnector):
    """Accepts remote decodes when this node may produce, remote prefills when it may consume."""

    def __init__(
        self,
        signer: ParamsSigner,
        claims: RemotePrefills,
        settings: ConnectorSettings,
        *,
        extra: PdConnectorConfig,
        metrics: TransferMetrics,
    ) -> None:
        self._signer = signer
        self._claims = claims
        self._config = settings.config
        self._vocab_size = settings.vocab_size
        self._is_bidirectional = extra.bidirectional_kv_xfer
        self._metrics = metrics
        # A claim is at most a handshake and the claim itself.
        self._timeout_s = 3 * extra.control_timeout

    async def admit(self, request: GenerateRequest) -> Admitted:
        """Claims the remote prefill or the turn before, if `request` names one.

        Returns it without P's answer when P does not fit: its first token is another model's.
        Raises KVTransferParamsError for parameters that are partial, not signed by a node of this
        cluster or not for this node, and KVLoadError when P does not hold what they name, or cannot
        be asked, and the policy is `fail`.

        A turn before that cannot be had is no error, whatever the policy: nothing was promised, and
        this node can compute every token. It is counted by cause, and D need not keep it.
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
            if await self._claim(request, params):
                return Admitted(request, first_token)
            failed = msgspec.structs.replace(request, kv_transfer_params=FAILED_PREFILL)
            return Admitted(failed)
        if params.is_return_pull:
            await self._claim_turn(request, params)
        if not params.do_remote_decode:
            return Admitted(request)
        # Another node decodes: this one computes the prompt and samples one token.
        sampling = msgspec.structs.replace(request.sampling, max_tokens=1)
        return Admitted(msgspec.structs.replace(request, sampling=sampling))

    def problems(self) -> tuple[HandOverProblem, ...]:
        """Peers from which this node takes hand-overs in vain at present."""
        return self._claims.problems.present()

    def withdraw(self, request_id: str) -> None:
        """Gives up the claim of a request that never reached the scheduler."""
        self._claims.end(request_id)

    async def _claim(self, request: GenerateRequest, params: KVTransferParams) -> bool:
        """Whether P's answer may be used, if only its first token."""
        check_remote_prefill(request, params)
        self._verify(params)
        claim = PrefillClaim(request.request_id, params)
        try:
            await self._ask(claim)
        except FAILURES as error:
            self._cannot_be_had(claim, error)
            return not isinstance(error, TransportError)
        return True

    def _verify(self, params: KVTransferParams) -> None:
        """A refusal names no peer in the log's rhythm: who sent `params` may have made it up."""
        try:
            self._signer.verify(params)
        except KVTransferParamsError as error:
            self._metrics.hand_over_failures("refused").inc()
            self._claims.problems.note("refused", str(error))
            raise

    async def _claim_turn(self, request: GenerateRequest, params: KVTransferParams) -> None:
        check_return_pull(params)
        self._signer.verify(params)
        cause = why_not_from(request, params) if self._is_bidirectional else "disabled"
        claim = PrefillClaim(request.request_id, params)
        if cause is not None:
            self._claims.decline(claim)
            self._metrics.return_pulls_skipped(cause).inc()
            return
        try:
            await self._ask(claim)
        except FAILURES as error:
            self._compute_here(request, error)

    async def _ask(self, claim: PrefillClaim) -> None:
        """What becomes of a claim that the peer does not answer is the caller's business."""
        try:
            asked = self._claims.begin(claim)
            if asked is not None:
                await asyncio.wait_for(asyncio.wrap_future(asked), self._timeout_s)
        except FAILURES:
            raise
        except BaseException:
            self.withdraw(claim.request_id)
            raise

    def _compute_here(self, request: GenerateRequest, error: BaseException) -> None:
        cause = causes.of_question(error)
        log.info("the turn before cannot be pulled", cause=cause, error=str(error))
        self._metrics.return_pulls_skipped(cause).inc()
        self.withdraw(request.request_id)

    def _cannot_be_had(self, claim: PrefillClaim, error: BaseException) -> None:
        self._claims.failed(claim, causes.of_question(error), error)
        if self._config.kv_load_failure_policy == "recompute":
            return
        self.withdraw(claim.request_id)
        raise KVLoadError(f"the remote prefill cannot be loaded: {error}") from error
