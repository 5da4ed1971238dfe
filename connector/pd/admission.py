"""Judges `kv_transfer_params` at the door: typed errors before anything is reserved, claims after.

Runs on the event loop; what blocks happens on the claim keeper's threads.
"""

import asyncio

import msgspec
import structlog

from connector.pd.claims import ClaimKeeper, PrefillClaim
from connector.pd.params import ParamsSigner, check_remote_prefill
from engine.config import KVTransferConfig
from engine.errors import (
    DeadlineExceededError,
    KVLoadError,
    KVTransferParamsError,
    TandemError,
    TransportError,
    UnavailableError,
)
from engine.kv_connector import AdmissionConnector
from engine.metrics import TransferMetrics
from engine.types import GenerateRequest, KVTransferParams

log = structlog.get_logger()

REFUSED_BY_ROLE = {"kv_consumer": "do_remote_decode", "kv_producer": "do_remote_prefill"}


class PdAdmission(AdmissionConnector):
    """Accepts remote decodes when this node may produce, remote prefills when it may consume."""

    def __init__(
        self,
        signer: ParamsSigner,
        claims: ClaimKeeper,
        config: KVTransferConfig,
        *,
        metrics: TransferMetrics,
    ) -> None:
        self._signer = signer
        self._claims = claims
        self._config = config
        self._metrics = metrics
        # A claim is at most a handshake and the claim itself.
        self._timeout_s = 3 * config.kv_connector_extra_config.control_timeout

    async def admit(self, request: GenerateRequest) -> GenerateRequest:
        """Claims the remote prefill, if `request` names one.

        Returns it without parameters when P does not fit: its first token is another model's.
        Raises KVTransferParamsError for parameters that are partial, foreign, expired or not for
        this node, and KVLoadError when P cannot be reached and the policy is `fail`.
        """
        params = request.kv_transfer_params
        if params is None:
            return request
        refused = REFUSED_BY_ROLE.get(self._config.kv_role)
        if refused is not None and getattr(params, refused):
            raise KVTransferParamsError(
                f"this node's kv_role is {self._config.kv_role}: it refuses {refused}"
            )
        if params.do_remote_prefill and not await self._claim(request, params):
            return msgspec.structs.replace(request, kv_transfer_params=None)
        return request

    def withdraw(self, request_id: str) -> None:
        """Gives up the claim of a request that never reached the scheduler."""
        self._claims.end(request_id)

    async def _claim(self, request: GenerateRequest, params: KVTransferParams) -> bool:
        """Whether P's answer may be used, if only its first token."""
        check_remote_prefill(request, params)
        self._signer.verify(params)
        claim = PrefillClaim(request.request_id, params)
        asked = asyncio.wrap_future(self._claims.begin(claim))
        try:
            await asyncio.wait_for(asked, self._timeout_s)
        except (UnavailableError, DeadlineExceededError, TransportError, TimeoutError) as error:
            self._unreachable(claim, error)
            return not isinstance(error, TransportError)
        except BaseException:
            self._claims.end(request.request_id)
            raise
        return True

    def _unreachable(self, claim: PrefillClaim, error: TandemError | TimeoutError) -> None:
        log.warning("a remote prefill cannot be claimed", error=str(error))
        self._metrics.failed.inc()
        if self._config.kv_load_failure_policy == "recompute":
            claim.failure = "peer_unreachable"
            return
        self.withdraw(claim.request_id)
        raise KVLoadError(f"the remote prefill cannot be loaded: {error}") from error
