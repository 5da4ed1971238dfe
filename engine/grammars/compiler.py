"""Grammars that bind a request's output, compiled and followed in processes that can be ended.

A grammar is one string, llguidance's JSON form; the API makes it from a JSON schema, a regular
expression, a list of choices or a Lark grammar. Every node that works on a request compiles it
again: what it allows next depends on the output tokens alone, so P and D agree.

A few hundred characters can cost any amount of time and memory. So nothing is compiled in a
process that serves: each grammar has a process of its own, forked from one that knows the
tokenizer, with limits of time and memory that the system enforces. It answers each token with the
mask for the next one, while the engine is at other requests.

    event loop      GrammarCompiler --> ForkServer ==fork==> a process per grammar
                                                               ^             |
    engine thread   Matcher.accept(token) ---------------------+             |
                    Matcher.mask <------ event loop <------ the next mask ---+

A grammar is tried at once for a quarter of a second. Few take longer, and these go on, from their
start, one at a time and after all else on the machine.

    quick lane   |-a-|-b-|-c-|     four at once, three of one tenant: honest ones are here
    slow lane    |------ d ------| one at a time, tenants in turn
"""

import asyncio
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.errors import GrammarBusyError, GrammarError, InvalidRequestError, OverloadedError
from engine.grammars.follower import MEMORY_BYTES
from engine.grammars.matcher import MaskNews, Matcher
from engine.grammars.processes import ForkServer, GrammarProcess
from engine.turns import Turns
from engine.types import TokenId

QUICK_S: Final = 0.25
COMPILE_S: Final = 4.0
"""Of a core; the slowest honest grammar of the tests, 4,000 nested schemas, takes 0.9 s."""
CLOCK_S: Final = 60.0
"""By the clock; beside five busy threads on two cores a slow grammar gets an eighth of a core."""
TURN_S: Final = 30.0
QUICK_AT_ONCE: Final = 4
MAX_BYTES: Final = 2**30
IDLE_BYTES: Final = 40 * 2**20
MAX_IDLE: Final = 32
MAX_REFUSED: Final = 1024


class _Key(NamedTuple):
    """Tenants share no process: what one makes slow is its own."""

    tenant: str
    digest: bytes


@dataclass(slots=True)
class _Starting:
    """A grammar that is being compiled, and how many requests wait for it."""

    work: "asyncio.Task[GrammarProcess]"
    num_waiting: int = 0


class GrammarCompiler:
    """Compiles grammars for the tokens of one tokenizer; on the event loop, which `close`s it.

    `tokenizer_json`: makes its tokenizer.json with all tokens, None without any. `vocab_size`:
    logits per token, which may be more or fewer than the tokenizer has.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str | None],
        vocab_size: int,
        eos_token_ids: Iterable[TokenId],
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self.news = MaskNews()
        self._server: ForkServer | None = None
        self._server_starts = asyncio.Lock()
        self._quick = Turns(QUICK_AT_ONCE, per_tenant=QUICK_AT_ONCE - 1)
        self._slow = Turns(1)
        self._starting: dict[_Key, _Starting] = {}
        # Those without a sequence stand in the order in which they were left.
        self._processes: OrderedDict[_Key, GrammarProcess] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    @property
    def num_processes(self) -> int:
        """Processes that follow a grammar, or wait for their next sequence."""
        return len(self._processes)

    @property
    def num_sequences(self) -> int:
        """Outputs that follow a grammar now; from any thread."""
        return sum(it.num_sequences for it in self._processes.copy().values())

    @property
    def num_bytes(self) -> int:
        """Memory of all processes; from any thread."""
        return sum(it.num_bytes for it in self._processes.copy().values())

    async def compile(
        self, grammar: str, output: Sequence[TokenId] = (), *, tenant: str = ""
    ) -> Matcher:
        """The matcher after `output`, with its first mask; `close` it.

        Raises GrammarError for a grammar that cannot be compiled or followed within the bounds,
        InvalidRequestError for a model without text, or that does not allow `output`, and
        GrammarBusyError where no turn comes in time.
        """
        if not self._eos_token_ids:
            raise InvalidRequestError("a grammar needs a model with an end-of-text token")
        key = _Key(tenant, hashlib.blake2b(grammar.encode(), digest_size=16).digest())
        if (refusal := self._refused.get(key.digest)) is not None:
            raise GrammarError(refusal)
        process = self._processes.get(key)
        if process is None:
            process = await self._started(key, grammar)
        return await process.open(output, self.news)

    async def close(self) -> None:
        """Ends all grammar processes."""
        for starting in self._starting.values():
            starting.work.cancel()
        for process in list(self._processes.values()):
            process.end()
        if self._server is not None:
            await self._server.close()

    async def _started(self, key: _Key, grammar: str) -> GrammarProcess:
        """The process of `grammar`; all who ask meanwhile wait for the same one."""
        if (starting := self._starting.get(key)) is None:
            work = asyncio.ensure_future(self._start(key, grammar))
            # Looked at, since asyncio logs an error that nobody hears where nobody waits any more.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            starting = self._starting[key] = _Starting(work)
        starting.num_waiting += 1
        try:
            return await asyncio.shield(starting.work)
        finally:
            starting.num_waiting -= 1
            if not starting.num_waiting:
                del self._starting[key]
                starting.work.cancel()  # if it still works, nobody waits for it any more

    async def _start(self, key: _Key, grammar: str) -> GrammarProcess:
        try:
            process = await self._compiled(key, grammar, QUICK_S)
            process = process or await self._compiled(key, grammar, COMPILE_S)
            if process is None:
                raise GrammarError(
                    f"the grammar takes more than {COMPILE_S:g} s of a core or "
                    f"{MEMORY_BYTES >> 20} MiB to compile: make it smaller"
                )
        except GrammarError as error:
            self._refused[key.digest] = str(error)
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
            raise
        process.on_news = lambda told: self._on_news(key, told)
        self._processes[key] = process
        return process

    async def _compiled(self, key: _Key, grammar: str, limit_s: float) -> GrammarProcess | None:
        """None where it takes longer than `limit_s` of a core, or too much memory."""
        gives_way = limit_s > QUICK_S
        lane = self._slow if gives_way else self._quick
        try:
            async with lane.turn(key.tenant, TURN_S):
                process = (await self._fork_server()).fork(key.tenant)
                async with asyncio.timeout(CLOCK_S):
                    is_done = await process.compile(grammar, limit_s=limit_s, gives_way=gives_way)
                return process if is_done else None
        except (TimeoutError, OverloadedError) as error:
            raise GrammarBusyError("other grammars are being compiled: try again") from error

    async def _fork_server(self) -> ForkServer:
        """Started with the first grammar, and again should it have died."""
        async with self._server_starts:
            if self._server is None or not self._server.is_alive:
                text = self._tokenizer_json()
                if text is None:
                    raise InvalidRequestError(
                        "a grammar needs a tokenizer and this model folder has no tokenizer.json",
                        code="no_tokenizer",
                    )
                if self._server is not None:
                    await self._server.close()
                self._server = await ForkServer.start(text, self._vocab_size, self._eos_token_ids)
            return self._server

    def _on_news(self, key: _Key, process: GrammarProcess) -> None:
        if process.is_ended:
            self._processes.pop(key, None)
        elif not process.num_sequences:
            self._processes.move_to_end(key)
        self._end_idle()
        if self.num_bytes <= MAX_BYTES:
            return
        # The largest process of the tenant whose grammars take the most memory.
        by_tenant: dict[str, list[GrammarProcess]] = defaultdict(list)
        for other in self._processes.values():
            by_tenant[other.tenant].append(other)
        most = max(by_tenant.values(), key=lambda them: sum(it.num_bytes for it in them))
        max(most, key=lambda it: it.num_bytes).end()

    def _end_idle(self) -> None:
        """The longest idle ones go first."""
        # Whoever waited for a new one is about to open the first sequence.
        new = self._starting
        idle = [
            it for key, it in self._processes.items() if not it.num_sequences and key not in new
        ]
        num_bytes = sum(it.num_bytes for it in idle)
        for number, process in enumerate(idle):
            if len(idle) - number <= MAX_IDLE and num_bytes <= IDLE_BYTES:
                return
            num_bytes -= process.num_bytes
            process.end()
