"""Hostile grammars: they are refused, or followed, and hold up nobody else."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from typing import Any

import llguidance
import psutil
import pytest

from engine.errors import GrammarBusyError, GrammarError, InvalidRequestError
from engine.grammars import compiler as module
from engine.grammars.processes import LEAST_BYTES
from engine.types import MAX_GRAMMAR_CHARS
from serving.api.structured_output import GrammarFields, grammar_of
from serving.api.tokenizer import load_tokenizer
from serving.process import wait_until
from tests.support.api.grammars import (
    END,
    MODEL,
    VOCABULARY,
    compiling,
    grammar_processes,
    mask_of,
    tokens_in,
)
from tests.support.nodes.leaks import grammar_servers
from tests.tiers import everyday


def rules(count: int) -> dict[str, Any]:
    chain = "\n".join(f"x{number}: x{number + 1}" for number in range(count))
    return {"guided_grammar": f'start: x0\n{chain}\nx{count}: "a"'}


def references(count: int, key: str) -> dict[str, Any]:
    def one(number: int) -> dict[str, object]:
        follows: Any = {"$ref": f"#/$defs/{number + 1}"}
        return {key: {"p": follows} if key == "properties" else [follows]}

    defs = {str(number): one(number) for number in range(count)} | {str(count): {"type": "string"}}
    return {"guided_json": {"$ref": "#/$defs/0", "$defs": defs}}


def words(count: int, length: int) -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=length)) for _ in range(count)]


def made(**fields: Any) -> str:
    return grammar_of(GrammarFields(**fields))


CHAINS = {
    "rules": rules(18_000),
    "properties": references(4_000, "properties"),
    "allOf": references(5_000, "allOf"),
    "anyOf": references(5_000, "anyOf"),
}
"""Of almost as many characters as are allowed."""

ENDLESS: dict[str, dict[str, Any]] = {
    "intersections": {
        "guided_json": {
            "allOf": [{"type": "string", "pattern": f"^(.*a.{{{n}}}b.*)$"} for n in range(3, 27)]
        }
    },
    "products": {
        "guided_json": {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]}
    },
    "products in Lark": {
        "guided_grammar": 'start: %json {"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, '
        '{"multipleOf": 83}, {"multipleOf": 79}]}'
    },
    "repeats": {"guided_regex": "(((a{100}){100}){100}){100}"},
    "optional letters": {"guided_regex": "(a?){3000}a{3000}"},
    "no end": {"guided_grammar": 'start: "a" start'},
}
"""Grammars that take more time or memory than there is, or that no output can end."""

LONG: dict[str, dict[str, Any]] = {
    "1,024 choices of 200": {"guided_choice": words(1024, 200)},
    "20,000 words": {"guided_regex": "|".join(words(20_000, 8))},
    "20,000 values": {"guided_json": {"enum": words(20_000, 8)}},
    "anything": {"structured_outputs": None, "guided_json": True},
}
"""As much as the documents allow."""


@pytest.mark.parametrize("name", everyday(tuple(CHAINS), ("rules", "allOf")))
async def test_a_chain_of_references_is_followed_or_refused(name: str) -> None:
    grammar = made(**CHAINS[name])
    assert MAX_GRAMMAR_CHARS // 2 < len(grammar) <= MAX_GRAMMAR_CHARS
    async with compiling() as compiler:
        try:
            assert any((await compiler.compile(grammar)).mask or b"")
        except GrammarError as error:
            assert "make it s" in str(error) or "too" in str(error)


def test_a_schema_nested_too_deeply_is_told_so_and_what_to_do() -> None:
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InvalidRequestError, match="guided_json is nested too deeply: flatten it"):
        made(guided_json=schema)


@pytest.mark.parametrize(
    "name", everyday(tuple(ENDLESS), ("products", "optional letters", "no end"))
)
async def test_what_takes_too_much_is_refused_and_costs_nothing_the_second_time(name: str) -> None:
    grammar = made(**ENDLESS[name])
    async with compiling() as compiler:
        with pytest.raises(GrammarError) as first:
            matcher = await compiler.compile(grammar)
            await walked(matcher, 200, random.Random(1))
        assert "make it s" in str(first.value) or "no token may follow" in str(first.value)
        refused = compiler._refused.copy()
        (await compiler.compile(made(guided_choice=["a", "b"]))).close()  # honest ones go on
        if refused:
            await compiler._server.close()  # type: ignore[union-attr]
            with pytest.raises(GrammarError):  # so nothing was compiled
                await compiler.compile(grammar)


@pytest.mark.parametrize("name", LONG)
async def test_as_much_as_the_documents_allow_is_followed(name: str) -> None:
    async with compiling() as compiler:
        matcher = await compiler.compile(made(**LONG[name]))
        await walked(matcher, 40, random.Random(1))


async def test_masks_are_those_of_the_library_in_one_process() -> None:
    """The oracle: llguidance itself, on the same walks, many at once by one process."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer"}},
    }
    grammar = made(guided_json=schema)
    tokens = llguidance.LLTokenizer(load_tokenizer(MODEL).to_json() or "", VOCABULARY, [END])
    async with compiling() as compiler:

        async def follow(seed: int) -> None:
            draw, oracle = random.Random(seed), llguidance.LLMatcher(tokens, grammar, log_level=0)
            matcher, output = await compiler.compile(grammar), list[int]()
            for _ in range(30):
                mask = await mask_of(matcher)
                assert mask == oracle.compute_bitmask()
                token = draw.choice(tokens_in(mask))
                assert matcher.allows(token) and not matcher.allows(10 * VOCABULARY)
                if token == END:
                    break
                output.append(token)
                oracle.consume_token(token)
                matcher.accept(token)
            again = await compiler.compile(grammar, output)
            assert await mask_of(again) == await mask_of(matcher)
            matcher.close()
            again.close()

        await asyncio.gather(*map(follow, range(8)))
        assert compiler.num_processes == 1
        with pytest.raises(InvalidRequestError, match="output_token_ids"):
            await compiler.compile(grammar, [5, 5, 5])
        await asyncio.sleep(0.05)
        (process,) = compiler._processes.values()
        assert process.num_sequences == 0


async def test_a_long_output_goes_on_where_it_was() -> None:
    async with compiling() as compiler:
        grammar = made(guided_regex="(ab)*")
        tokens = load_tokenizer(MODEL).encode("ab" * 5, add_special_tokens=False)
        matcher = await compiler.compile(grammar, tokens * 10_000)
        assert END in tokens_in(await mask_of(matcher))


async def test_honest_grammars_wait_for_nobody_s_slow_ones() -> None:
    """Neither for those of others nor for those of the same tenant."""
    async with compiling() as compiler:
        slow = [
            asyncio.ensure_future(compiler.compile(made(**hostile(n)), tenant="bob"))
            for n in range(6)
        ]
        await asyncio.sleep(1.0)
        for tenant in ("alice", "bob"):
            (await compiler.compile(made(guided_choice=["a"]), tenant=tenant)).close()
        assert not all(it.done() for it in slow)
        for it in slow:
            it.cancel()
        assert all(map(is_end, await asyncio.gather(*slow, return_exceptions=True)))


async def test_a_grammar_that_nobody_waits_for_any_more_is_given_up() -> None:
    async with compiling() as compiler:
        asked = asyncio.ensure_future(compiler.compile(made(**ENDLESS["products"])))
        assert await wait_until(lambda: bool(grammar_processes(os.getpid())), 20)
        asked.cancel()
        assert await wait_until(lambda: not grammar_processes(os.getpid()), 5)


@pytest.mark.parametrize("limit", ["TURN_S", "CLOCK_S"])
async def test_no_turn_or_no_core_within_the_time_is_the_node_s_fault(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, 0.5)
    async with compiling() as compiler:
        asked = [compiler.compile(made(**hostile(n))) for n in range(3)]
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert any(isinstance(it, GrammarBusyError) for it in ends), ends


@pytest.mark.parametrize(
    ("limit", "value", "least"), [("MAX_IDLE", 3, 3), ("IDLE_BYTES", 3 * LEAST_BYTES, 1)]
)
async def test_processes_without_work_are_kept_within_bounds(
    limit: str, value: int, least: int, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, value)
    async with compiling() as compiler:
        for n in range(8):
            (await compiler.compile(made(guided_choice=[f"a{n}"]))).close()
        assert await wait_until(lambda: len(grammar_processes(os.getpid())) <= 3, 5)
        assert least <= compiler.num_processes <= 3


async def test_where_all_take_too_much_the_tenant_with_the_most_loses_its_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with compiling() as compiler:
        alice = await compiler.compile(made(guided_choice=["a"]), tenant="alice")
        large = await compiler.compile(made(guided_json=many_keys(2000)), tenant="bob")
        small = await compiler.compile(made(guided_choice=["b"]), tenant="bob")
        most = sum(it.num_bytes for it in compiler._processes.values()) - 2**20
        monkeypatch.setattr(module, "MAX_BYTES", most)
        small.accept(tokens_in(await mask_of(small))[0])
        await mask_of(small)
        with pytest.raises(GrammarError, match="too much time or memory"):
            await mask_of(large)
        assert alice.error is None


async def test_a_fork_server_that_died_is_replaced() -> None:
    async with compiling() as compiler:
        lost = await compiler.compile(made(guided_choice=["a", "b"]))
        (server,) = grammar_servers(os.getpid())
        os.kill(server, signal.SIGKILL)
        with pytest.raises(GrammarError):
            await ended(lost)
        (await compiler.compile(made(guided_choice=["a", "b"]))).close()


async def test_a_node_that_is_killed_leaves_no_process(tmp_path: Any) -> None:
    program = (
        "import asyncio\n"
        "from tests.support.api.grammars import compiling\n"
        "from serving.api.structured_output import GrammarFields, grammar_of\n"
        "async def main():\n"
        "    async with compiling() as compiler:\n"
        "        await compiler.compile(grammar_of(GrammarFields(guided_choice=['a'])))\n"
        "        print('compiled', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert node.stdout is not None
    assert b"compiled" in await asyncio.wait_for(node.stdout.readline(), 30)
    family = psutil.Process(node.pid).children(recursive=True)
    assert len(family) == 2
    node.kill()
    await node.wait()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, family, 5)
    assert len(gone) == 2 and not alive


def hostile(number: int) -> dict[str, Any]:
    """Each another grammar that takes all the time there is."""
    primes = (101, 103, 107, 109, 113, 127, 131)
    divisors = (97, 89, 83, primes[number % len(primes)])
    return {"guided_json": {"allOf": [{"type": "integer", "multipleOf": n} for n in divisors]}}


def many_keys(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(count)}}


def is_end(result: object) -> bool:
    return isinstance(result, GrammarError | asyncio.CancelledError)


async def ended(matcher: Any) -> None:
    assert await wait_until(lambda: matcher.error is not None, 5)
    raise matcher.error


async def walked(matcher: Any, num_tokens: int, draw: random.Random) -> Sequence[int]:
    """A walk by random tokens, to the end of the grammar at the latest."""
    output = list[int]()
    for _ in range(num_tokens):
        token = draw.choice(tokens_in(await mask_of(matcher)))
        if token == END:
            break
        output.append(token)
        matcher.accept(token)
    return output
