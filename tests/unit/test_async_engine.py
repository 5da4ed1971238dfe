"""The bridge to the engine thread when that thread dies: nobody may wait for ever."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from engine.async_engine import AsyncEngine, EngineLimits
from engine.config import NodeConfig
from engine.core import EngineCore
from engine.errors import EngineDeadError
from engine.grammar import GrammarCompiler
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup
from engine.kv_connector import Connector, LocalAdmission, SchedulerConnector, WorkerConnector
from engine.metrics import NodeMetrics, RequestMetrics
from engine.sched.scheduler import Scheduler
from engine.step import StepNews
from engine.types import GenerateRequest


class FragileCore(EngineCore):
    """An engine that dies in the first step that has work; it needs no model."""

    def __init__(self) -> None:
        group = KVCacheGroup(FullAttentionSpec(1, 8, "float32"), layers=(0,))
        cache = KVCacheManager(plan_arena((group,), 4, 1 << 20))
        connector = Connector(LocalAdmission(), SchedulerConnector(), WorkerConnector())
        scheduler = Scheduler(NodeConfig(), cache, connector.scheduler)
        super().__init__(scheduler, cast(Any, None), connector)

    def step(self) -> tuple[StepNews, bool]:
        if self.scheduler.num_waiting:
            raise RuntimeError("out of memory")
        return StepNews(), False


async def test_a_waiting_caller_hears_why_the_engine_died() -> None:
    none: frozenset[int] = frozenset()
    grammars = GrammarCompiler(Path(), 10, none)
    limits = EngineLimits(max_model_len=64, vocab_size=10, eos_token_ids=none, grammars=grammars)
    metrics = RequestMetrics(NodeMetrics("m", "e"))
    engine = AsyncEngine(FragileCore(), LocalAdmission(), limits, metrics=metrics)
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
