"""Grammars by real processes: compilers that end with a test, walks, and what a refusal says."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from engine.errors import InvalidRequestError
from engine.grammars.compiler import GrammarCompiler
from engine.grammars.matcher import Matcher
from serving.api.tokenizer import Tokenizer, load_tokenizer
from tests.support.nodes.leaks import children_of, excess, grammar_servers, held_by

MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "model"
VOCABULARY, END = 832, 2
PATIENCE_S = 20.0


@asynccontextmanager
async def compiling(tokenizer: Tokenizer | None = None) -> AsyncIterator[GrammarCompiler]:
    """A compiler, of the demo's tokens by default; afterwards no process or socket is left."""
    tokenizer = tokenizer or load_tokenizer(MODEL)
    before = held_by(os.getpid())
    compiler = GrammarCompiler(tokenizer.to_json, VOCABULARY, [END])
    try:
        yield compiler
    finally:
        await compiler.close()
    assert not excess(before, held_by(os.getpid()))
    assert not grammar_processes(os.getpid())


async def mask_of(matcher: Matcher) -> bytes:
    """The mask for the next token, once it has come. Raises the matcher's error."""
    await asyncio.to_thread(matcher.news.wait, [matcher], PATIENCE_S)
    if matcher.error is not None:
        raise matcher.error
    assert matcher.mask is not None
    return matcher.mask


def tokens_in(mask: bytes) -> list[int]:
    """The tokens that a mask allows."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(it) for it in np.flatnonzero(bits)]


async def refusal_of(grammar: str) -> str:
    """Why a node refuses the grammar; empty if it does not."""
    async with compiling() as compiler:
        try:
            (await compiler.compile(grammar)).close()
        except InvalidRequestError as error:
            return str(error)
    return ""


def grammar_processes(pid: int) -> list[int]:
    """The process of each grammar that `pid` has compiled and not ended."""
    return [process for server in grammar_servers(pid) for process in children_of(server)]
