"""Grammars that take all there is: the sender hears why, P asks no D, and others are served on."""

import asyncio
from typing import Any

import pytest

from tests.support.nodes.asking import CHAT, ask, question
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import ServedCluster

PROMPT = list(prompt_of(40, salt=9))
INTERSECTIONS = {
    "allOf": [{"type": "string", "pattern": f"^(.*a.{{{n}}}b.*)$"} for n in range(3, 27)]
}
PRODUCTS = {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": INTERSECTIONS}}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": INTERSECTIONS}}},
        "response_format",
    ),
    "products": ({"structured_outputs": {"json": PRODUCTS}}, "structured_outputs.json"),
    "no end": ({"guided_grammar": 'start: "a" start'}, "guided_grammar"),
    "tools": ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_the_sender_hears_why_and_others_are_served_on(
    served: ServedCluster, name: str
) -> None:
    body, param = HOSTILE[name]
    if name == "tools":
        path, asked = CHAT, {"messages": [{"role": "user", "content": "a"}], **body}
    else:
        path, asked = "/v1/completions", question(PROMPT, **body)
    expected = await ask(served.proxy.url, question(PROMPT, max_tokens=20))
    attack = [asyncio.ensure_future(ask(served.proxy.url, asked, path=path)) for _ in range(3)]
    honest = [
        await ask(served.proxy.url, question(PROMPT, max_tokens=20)),
        await ask(served.proxy.url, question(PROMPT, guided_choice=["yes", "no"])),
    ]
    assert honest[0].token_ids == expected.token_ids
    assert honest[1].body["choices"][0]["text"] in ("yes", "no")
    for answer in await asyncio.gather(*attack):
        error = answer.error(400)
        assert error["param"] == param and error["message"].startswith("the grammar")
    before = served.d.metrics()
    (await ask(served.proxy.url, asked, path=path)).error(400)  # from memory, and P's alone
    after = served.d.metrics()
    assert after["tandem:grammar_processes"] == before["tandem:grammar_processes"]
    for server in (served.p, served.d, served.proxy):
        server.assert_at_rest()


async def test_rules_that_leave_no_token_are_the_sender_s_fault(served: ServedCluster) -> None:
    body = question(PROMPT, guided_regex="[ab]{3}", bad_words=["a", "b"], ignore_eos=False)
    for url in (served.proxy.url, served.d.url):
        answer = await ask(url, body)
        # The tokens of a bad word may come where nothing else can, in pieces that are no word.
        assert answer.status == 200 or "exclude each other" in answer.error(400)["message"]
