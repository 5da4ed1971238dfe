"""The OpenAPI document: every route, made of the types that decode; and errors for other paths."""

import json
import re

import aiohttp

from serving.api.openapi import PATHS
from serving.api.served_model import ServedModel
from tests.support.api.api_double import ScriptedGenerator, running, tiny_serving


async def get(base: str, path: str, method: str = "GET") -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.request(method, base + path) as reply:
        return reply.status, await reply.text()


async def test_every_route_is_described_and_every_type_is_there(served: ServedModel) -> None:
    async with running(ScriptedGenerator([]), served, api_key="k") as base:
        status, text = await get(base, "/openapi.json")
    document = json.loads(text)
    assert status == 200 and document["paths"].keys() == PATHS.keys()
    names = document["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= names.keys()
    post = document["paths"]["/v1/completions"]["post"]
    assert post["security"] and not document["paths"]["/health"]["get"]["security"]
    fields = names["CompletionRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0]["maximum"] == 100
    assert fields["suffix"]["enum"] == [None, False, "", [], {}]


async def test_strict_servers_say_that_they_refuse_unknown_keys(served: ServedModel) -> None:
    refusals = {}
    for strict in (True, False):
        one = tiny_serving(served.tokenizer, strict_api=strict)
        async with running(ScriptedGenerator([]), one) as base:
            schemas = json.loads((await get(base, "/openapi.json"))[1])["components"]["schemas"]
        refusals[strict] = schemas["ChatRequest"].get("additionalProperties")
    assert refusals == {True: False, False: None}


async def test_other_paths_are_told_what_exists(served: ServedModel) -> None:
    async with running(ScriptedGenerator([]), served) as base:
        for path in ("/v1/embeddings", "/v2/messages", "/invocations"):
            status, text = await get(base, path, "POST")
            error = json.loads(text)["error"]
            assert (status, error["type"]) == (404, "not_found_error")
            assert error["message"].startswith(f"POST {path} is not served here")
            assert "/v1/chat/completions" in error["message"]
        status, text = await get(base, "/v1/completions")
        assert status == 405
        assert "GET /v1/completions: Method Not Allowed, use POST" in text
        assert (await get(base, "/ping", "POST"))[0] == 200
