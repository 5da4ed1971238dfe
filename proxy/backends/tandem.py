"""A node of this project, by gRPC. Its HTTP port, if that was given, tells where."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from msgspec import structs

from engine.errors import TandemError, UnavailableError
from engine.types import GenerateOutput, GenerateRequest, KVTransferParams, SamplingParams
from proxy.backends.worker import Backend, Call, HandOver, Prefill, is_whole, prefill_sampling
from serving.rpc.client import NodeClient
from serving.rpc.convert import prompt_to_bytes
from serving.rpc.messages import NodeInfo
from serving.rpc.node_http import NodeUrl, resolve_grpc_address
from serving.tls import ClientTls


class TandemNode:
    """A `Worker`. `token`: the cluster's, which both sides prove."""

    backend = Backend.TANDEM
    needs_prefill = False

    def __init__(self, url: NodeUrl, *, token: str | None, tls: ClientTls | None) -> None:
        self._url = url
        self._token = token
        self._tls = tls if url.has_tls else None
        self._client: NodeClient | None = None

    def encode_prompt(self, request: GenerateRequest) -> bytes:
        return prompt_to_bytes(request)

    def can_continue(self, sampling: SamplingParams) -> bool:
        """Always: sampling counts from the prompt's end, and grammars follow the output so far."""
        return True

    async def prefill(self, request: GenerateRequest, call: Call) -> Prefill:
        asked = prefill_request(request)
        outputs = self._reached.generate(asked, call.deadlines, call.prompt)
        async with aclosing(outputs):
            output = await anext(outputs)
        params = output.kv_transfer_params
        if params is None:
            if not is_whole(output, request):
                raise TandemError(f"node {self._url.text} prefilled without kv_transfer_params")
            return Prefill(output, None)
        held = params.remote_engine_id or "", params.remote_request_id or ""
        return Prefill(output, HandOver(*held, params))

    def generate(
        self, request: GenerateRequest, call: Call, hand_over: HandOver | None = None
    ) -> AsyncGenerator[GenerateOutput]:
        params = None if hand_over is None else hand_over.params
        asked = structs.replace(request, kv_transfer_params=params)
        return self._reached.generate(asked, call.deadlines, call.prompt)

    async def describe(self, timeout_s: float, *, is_lost: bool) -> NodeInfo:
        # A node that was lost may have restarted on another port: resolve its address again.
        if self._client is None or is_lost:
            address = await resolve_grpc_address(self._url, timeout_s=timeout_s, tls=self._tls)
            # The same address keeps its channel: streams may still run on it.
            if self._client is None or self._client.address != address:
                await self.close()
                self._client = NodeClient(address, token=self._token, tls=self._tls)
        return await self._client.describe(timeout_s)

    async def num_pulled_tokens(self, timeout_s: float) -> int:
        """Not counted: the last output of a request says it."""
        return 0

    async def get_tokenizer(self, timeout_s: float) -> Mapping[str, bytes]:
        return await self._reached.get_tokenizer(timeout_s)

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        await self._reached.reset_prefix_cache(timeout_s)

    async def release(self, engine_id: str, request_id: str, timeout_s: float) -> None:
        if engine_id and request_id:
            await self._reached.release(engine_id, request_id, reason="abort", timeout_s=timeout_s)

    def cut_off(self) -> None:
        if self._client is not None:
            self._client.cut_off()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    @property
    def _reached(self) -> NodeClient:
        if self._client is None:
            raise UnavailableError(f"node {self._url.text} has not been reached yet")
        return self._client


def prefill_request(request: GenerateRequest) -> GenerateRequest:
    """The request for P: the same sampling, one more token, and P keeps what it computes."""
    asked = structs.replace(request, sampling=prefill_sampling(request))
    return structs.replace(asked, kv_transfer_params=KVTransferParams(do_remote_decode=True))
