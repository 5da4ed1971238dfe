"""The bridge to the engine thread when that thread dies: nobody may wait for ever."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from engine.async_engine import AsyncEngine, EngineLimits
from engine.core import EngineCore
from engine.errors import EngineDeadError, InvalidRequestError
from engine.grammars.compiler import GrammarCompiler
from engine.grammars.matcher import Matcher
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup
from engine.kv_connector import Connector, LocalAdmission, SchedulerConnector, WorkerConnector
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.step import StepNews
from engine.types import GenerateRequest, SamplingParams
from serving.metrics import NodeMetrics
from serving.telemetry.request_metrics import EngineRequestMetrics
from serving.telemetry.request_records import RequestRecords


class FragileCore(EngineCore):
    """An engine that dies in the first step that has work; it needs no model."""

    def __init__(self) -> None:
        group = KVCacheGroup(FullAttentionSpec(1, 8, "float32"), layers=(0,))
        cache = KVCacheManager(plan_arena((group,), 4, 1 << 20))
        connector = Connector(LocalAdmission(), SchedulerConnector(), WorkerConnector())
        scheduler = Scheduler(SchedulerConfig(), cache, connector.scheduler)
        super().__init__(scheduler, cast(Any, None), connector)

    def step(self) -> tuple[StepNews, bool]:
        if self.scheduler.num_waiting:
            raise RuntimeError("out of memory")
        return StepNews(), False


def engine_of(core: EngineCore, grammars: type[GrammarCompiler] = GrammarCompiler) -> AsyncEngine:
    none: frozenset[int] = frozenset()
    limits = EngineLimits(
        max_model_len=64,
        vocab_size=10,
        eos_token_ids=none,
        grammars=grammars(lambda: None, 10, none),
    )
    records = RequestRecords(EngineRequestMetrics(NodeMetrics("m", "e")))
    return AsyncEngine(core, LocalAdmission(), limits, recording=records.recording)


class SlowCompiler(GrammarCompiler):
    """Compiles until it is let go."""

    go_on = asyncio.Event()

    async def compile(
        self, grammar: str, output: Sequence[int] = (), *, tenant: str = ""
    ) -> Matcher:
        await self.go_on.wait()
        raise InvalidRequestError("no grammar")


async def test_a_request_whose_grammar_is_compiled_is_under_way() -> None:
    engine = engine_of(FragileCore(), SlowCompiler)
    engine.start()
    sampling = SamplingParams(grammar="{}")
    request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=sampling)
    asked = asyncio.ensure_future(anext(engine.generate(request)))
    await asyncio.sleep(0.05)
    assert engine.num_open == 1  # so a node that drains waits for it
    SlowCompiler.go_on.set()
    with pytest.raises(InvalidRequestError):
        await asked
    assert engine.num_open == 0
    await engine.close()


async def test_a_waiting_caller_hears_why_the_engine_died() -> None:
    engine = engine_of(FragileCore())
    engine.start()
    request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2))
    ended = asyncio.create_task(engine.wait())
    with pytest.raises(EngineDeadError, match="has stopped"):
        async with asyncio.timeout(10):
            await anext(engine.generate(request))
    with pytest.raises(EngineDeadError, match="out of memory"):
        await asyncio.wait_for(ended, 10)
    with pytest.raises(EngineDeadError, match="has stopped"):
        await engine.check_health()
    with pytest.raises(EngineDeadError, match="has stopped"):
        await anext(engine.generate(request))
    await engine.close()
