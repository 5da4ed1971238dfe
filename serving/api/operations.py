"""Endpoints beside generation: models, tokenize, detokenize, probes, version, metrics."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import InvalidRequestError, PromptTooLongError, TandemError, UnavailableError
from engine.prompt_checks import check_token_ids
from serving.api.json_body import decode_body
from serving.api.messages.request import count_tokens
from serving.api.plan import check_model, encode_chat
from serving.api.replies import (
    DetokenizeReply,
    LoadReply,
    ModelCard,
    ModelList,
    ReadyReply,
    TokenizeReply,
    VersionReply,
)
from serving.api.schema import DetokenizeRequest, TokenizeRequest
from serving.api.served_model import ServedModel, max_body_bytes
from serving.generator import Generator
from serving.http.callers import require_operator
from serving.http.request_bodies import RequestBodies

HEALTH_PATHS = ("/health", "/live", "/ping")
PROBE_PATHS = (*HEALTH_PATHS, "/ready", "/metrics", "/load")
PROBE_TIMEOUT_S = 5.0
Body = TypeVar("Body", bound=msgspec.Struct)
Checked = TypeVar("Checked")


class Operations:
    """Handlers that need the generator's health or the tokenizer, but generate nothing."""

    def __init__(
        self,
        generator: Generator,
        served: ServedModel,
        registry: CollectorRegistry,
        *,
        bodies: RequestBodies,
        load: Callable[[], int],
        stages: Callable[[], Mapping[str, str]],
    ) -> None:
        self._generator = generator
        self._load = load
        self._stages = stages
        self._served = served
        self._bodies = bodies
        self._registry = registry
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """Paths as vLLM, OpenAI clients and Kubernetes probes know them."""
        tokenizer_info = [Route("/tokenizer_info", self.tokenizer_info)]
        return [
            # Some platforms ask /ping with POST.
            *(Route(path, self.health, methods=["GET", "POST"]) for path in HEALTH_PATHS),
            Route("/ready", self.ready),
            Route("/load", self.load),
            Route("/version", self.version),
            Route("/metrics", partial(metrics, self._registry)),
            Route("/v1/models", self.models),
            # A path, since names such as those of the hub have slashes.
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenize", partial(self._in_thread, self._tokenize), methods=["POST"]),
            Route(
                "/v1/messages/count_tokens",
                partial(self._in_thread, partial(count_tokens, self._served)),
                methods=["POST"],
            ),
            Route("/detokenize", partial(self._in_thread, self._detokenize), methods=["POST"]),
            *(tokenizer_info if self._served.has_tokenizer_info else ()),
        ]

    async def health(self, request: Request) -> Response:
        await _probe(self._generator.check_health)
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        """200 where traffic is welcome; `degraded` where it costs more than it should."""
        reasons = await _probe(self._generator.check_ready)
        status = "degraded" if reasons else "ready"
        return _json(
            ReadyReply(status=status, reasons=reasons, nodes=self._stages() or msgspec.UNSET)
        )

    async def load(self, request: Request) -> Response:
        """Generating requests that are under way on this server, as vLLM spells it."""
        return _json(LoadReply(server_load=self._load()))

    async def version(self, request: Request) -> Response:
        return _json(VersionReply(version=self._served.version))

    async def models(self, request: Request) -> Response:
        return _json(ModelList(data=[self._card(it) for it in self._served.served_model_names]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        check_model(name, self._served)
        return _json(self._card(name))

    async def tokenizer_info(self, request: Request) -> Response:
        """Contents of tokenizer_config.json, special tokens as texts, and the template in use."""
        tokenizer = self._served.tokenizer
        tokenizer.require_text("/tokenizer_info")
        template = tokenizer.chat_template
        info = {
            **tokenizer.config,
            **tokenizer.special_tokens,
            **({} if template is None else {"chat_template": template}),
        }
        # Not msgspec: an unlimited `model_max_length` is written as an integer of 100 bits.
        content = await asyncio.to_thread(json.dumps, info)
        return Response(content, media_type="application/json")

    async def _in_thread(self, work: Callable[[bytes], object], request: Request) -> Response:
        """The reply is encoded on the thread too: it may be as long as the request."""
        content = await self._bodies.process(
            request.scope,
            request.receive,
            lambda body: msgspec.json.encode(work(body)),
            max_bytes=max_body_bytes(self._served, num_prompts=1),
        )
        return Response(content, media_type="application/json")

    def _card(self, name: str) -> ModelCard:
        root = self._served.root or self._served.model_name
        return ModelCard(
            id=name, created=self._created, root=root, max_model_len=self._served.max_model_len
        )

    def _decode(self, body: bytes, kind: type[Body]) -> Body:
        served = self._served
        return decode_body(body, kind, served.max_model_len, strict=served.strict_api)

    def _tokenize(self, body: bytes) -> TokenizeReply:
        fields = self._decode(body, TokenizeRequest)
        check_model(fields.model, self._served)
        tokens, text_of = self._tokens(fields), self._served.tokenizer.token_text
        return TokenizeReply(
            count=len(tokens),
            max_model_len=self._served.max_model_len,
            tokens=tokens,
            token_strs=list(map(text_of, tokens)) if fields.return_token_strs else None,
        )

    def _tokens(self, fields: TokenizeRequest) -> tuple[int, ...]:
        tokenizer = self._served.tokenizer
        if fields.prompt is not None and fields.messages is None:
            special = fields.add_special_tokens is not False
            limit = self._served.text_limit(must_fit=True)
            return tokenizer.encode(fields.prompt, add_special_tokens=special, limit=limit)
        if fields.messages is None or fields.prompt is not None:
            raise InvalidRequestError("send either prompt or messages", param="prompt")
        return encode_chat(fields, fields.messages, self._served, tools=fields.tools or ())

    def _detokenize(self, body: bytes) -> DetokenizeReply:
        fields = self._decode(body, DetokenizeRequest)
        check_model(fields.model, self._served)
        # A reply may be far longer than its ids: bounded like a prompt.
        if len(fields.tokens) > self._served.max_model_len:
            raise PromptTooLongError(
                f"This model's maximum context length is {self._served.max_model_len} tokens. "
                f"However, tokens holds {len(fields.tokens)} ids: send less at once.",
                param="tokens",
                code="context_length_exceeded",
            )
        check_token_ids(fields.tokens, self._served.vocab_size, "tokens")
        self._served.tokenizer.require_text("/detokenize")
        text = self._served.tokenizer.decode(fields.tokens, skip_special_tokens=False)
        return DetokenizeReply(prompt=text)


async def metrics(registry: CollectorRegistry, request: Request) -> Response:
    """Prometheus' text of a registry; collecting it takes time, so not on the event loop."""
    # Gauges ask schedulers and pools, and thousands of series become text.
    text = await asyncio.to_thread(generate_latest, registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def _probe(check: Callable[[], Awaitable[Checked]]) -> Checked:
    """Result of the check; raises UnavailableError for any failure, a slow answer included."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await check()
    except TimeoutError as error:
        raise UnavailableError(f"no answer within {PROBE_TIMEOUT_S:g} s") from error
    except UnavailableError:
        raise
    except TandemError as error:
        raise UnavailableError(str(error)) from error


def _json(reply: object) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")


# vLLM's parameters that ask for more than this server does.
_UNSERVED = ("reset_running_requests", "reset_external")


def reset_route(reset: Callable[[], Awaitable[None]]) -> Route:
    """The route. `reset` raises UnavailableError, which is a 503, while the cache is in use."""

    async def post(request: Request) -> Response:
        """200 with an empty body once nothing of what was cached before can be found."""
        require_operator(request.scope)
        for name in _UNSERVED:
            if request.query_params.get(name, "false").lower() not in ("false", "0", ""):
                raise InvalidRequestError(
                    f"{name} is not supported: running requests and tiers keep what they have",
                    param=name,
                )
        await reset()
        return Response()

    return Route("/reset_prefix_cache", post, methods=["POST"])
