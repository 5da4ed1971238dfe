"""Wrong requests to real processes: a typed OpenAI error each, and then all goes on as before."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks.support.small_models import VOCABULARY
from connector.pd.wire.control_client import ControlClient
from engine.errors import AuthenticationError, UnprovenPeerError
from tests.support.nodes.asking import ask, get, question
from tests.support.nodes.cluster import CONTEXT
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import API_KEY, CLUSTER_TOKEN, ServedCluster

PROMPT = list(prompt_of(90))
SERVERS = ("p", "d", "proxy")
TOO_LONG = "context_length_exceeded"

# body, parameter that the error names, code that it has (None: the status)
WRONG_REQUESTS: list[tuple[dict[str, Any], str | None, str | None]] = [
    (question([]), "prompt", None),
    (question(""), "prompt", None),
    (question([[]]), "prompt", None),
    (question([5] * CONTEXT), "prompt", TOO_LONG),
    (question([5] * 10_000), "prompt", TOO_LONG),
    (question("a" * 5 * CONTEXT), "prompt", TOO_LONG),
    (question([5] * (CONTEXT - 9)), "max_tokens", TOO_LONG),
    (question([5, -1]), "prompt", None),
    (question([5, VOCABULARY]), "prompt", None),
    (question([5, 2**40]), "prompt", None),
    (question([5, 2**63]), None, None),
    (question([5, 2**70]), None, None),
    (question([[5, 6], [5, VOCABULARY]]), "prompt", None),
    (question([5, 1.5]), None, None),
    (question([5, "six"]), "prompt", None),
    (question([True]), None, None),
    (question({"text": "hello"}), "prompt", None),
    (question(None), "prompt", None),
    ({"model": "tiny"}, "prompt", None),
    (question(PROMPT, max_tokens=0), "max_tokens", None),
    (question(PROMPT, max_tokens=-3), "max_tokens", None),
    (question(PROMPT, max_tokens="ten"), "max_tokens", None),
    (question(PROMPT, max_tokens=CONTEXT), "max_tokens", TOO_LONG),
    (question(PROMPT, temperature="hot"), "temperature", None),
    (question(PROMPT, temperature=-1), "temperature", None),
    (question(PROMPT, top_p=0), "top_p", None),
    (question(PROMPT, logprobs=1000), "logprobs", None),
    (question(PROMPT, n=0), "n", None),
    (question(PROMPT, stop_token_ids=[VOCABULARY]), "stop_token_ids", None),
    (question(PROMPT, seed=2**64), "seed", None),
    (question(PROMPT, priority=-1), "priority", None),
    (question(PROMPT, stream_options={"include_usage": True}), "stream_options", None),
]
MALFORMED = [
    b"",
    b"{",
    b'{"prompt": [5',
    b"[]",
    b"null",
    b'"prompt"',
    b"\xff\xfe{}",
    b'{"prompt": [5], "temperature": NaN}',
    b'{"prompt": [5]} {"prompt": [6]}',
    b'{"metadata": ' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"metadata": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
]


@pytest.fixture(params=SERVERS)
async def url(request: pytest.FixtureRequest, served: ServedCluster) -> AsyncIterator[str]:
    """One of the three servers, which must give the same good answer before and after the test."""
    server = getattr(served, request.param)
    before = (await ask(server.url, question(PROMPT))).token_ids
    yield server.url
    assert (await ask(server.url, question(PROMPT))).token_ids == before


async def test_wrong_requests_are_a_400_that_names_the_parameter(url: str) -> None:
    for body, param, code in WRONG_REQUESTS:
        error = (await ask(url, body)).error(400)
        assert error["type"] == "invalid_request_error", body
        assert error["code"] == (code or 400), (body, error)
        assert param in (None, error["param"]), (body, error)


async def test_wrong_requests_for_a_stream_are_an_error_too_not_a_stream(url: str) -> None:
    for body, _, code in WRONG_REQUESTS[:-1]:
        error = (await ask(url, {**body, "stream": True})).error(400)
        assert error["code"] == (code or 400), (body, error)


async def test_what_is_no_json_object_is_a_400(url: str) -> None:
    for body in MALFORMED:
        error = (await ask(url, body)).error(400)
        assert error["type"] == "invalid_request_error", body[:50]
    assert (await ask(url, question(PROMPT), content_type="text/plain")).error(415)


async def test_an_unknown_model_is_a_404(url: str) -> None:
    for path, body in (
        ("/v1/completions", question(PROMPT, model="gpt-4")),
        ("/v1/chat/completions", {"model": "gpt-4", "messages": [{"role": "user", "content": ""}]}),
    ):
        error = (await ask(url, body, path=path)).error(404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert (await get(url, "/v1/models/gpt-4")).error(404)["code"] == "model_not_found"
    assert (await get(url, "/v1/no-such-path")).error(404)


async def test_a_wrong_key_is_a_401_everywhere(url: str) -> None:
    for key in (None, "", "wrong", API_KEY + "s", API_KEY.upper(), CLUSTER_TOKEN):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            answer = await ask(url, question(PROMPT), path=path, key=key)
            assert answer.error(401)["type"] == "authentication_error"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert (await get(url, "/v1/models", key=key)).error(401)


@pytest.mark.parametrize("server", ["p", "d"])
async def test_the_nodes_own_doors_open_with_the_cluster_token_only(
    served: ServedCluster, server: str
) -> None:
    url = getattr(served, server).url
    info = (await get(url, "/node_info", key=None)).body
    assert sorted(info) == ["engine_id", "grpc_port", "host", "kind"]
    for token in (None, "wrong", API_KEY, CLUSTER_TOKEN):
        address = f"127.0.0.1:{info['grpc_port']}"
        guest = ControlClient(address, token=token, caller_engine_id="a guest", timeout_s=5.0)
        async with guest as control:
            if token == CLUSTER_TOKEN:
                assert (await control.handshake()).engine_id == info["engine_id"]
                continue
            refusal = AuthenticationError if token is None else UnprovenPeerError
            with pytest.raises(refusal, match="TANDEM_CLUSTER_TOKEN"):
                await control.handshake()


async def test_a_proxy_takes_no_kv_transfer_params_from_clients(served: ServedCluster) -> None:
    plain = (await ask(served.proxy.url, question(PROMPT))).token_ids
    for params in (True, {"do_remote_prefill": True, "remote_host": "10.1.2.3"}, {"unknown": 1}):
        answer = await ask(served.proxy.url, question(PROMPT, kv_transfer_params=params))
        assert answer.token_ids == plain
        assert "kv_transfer_params" not in answer.body
