"""An engine without a node: real scheduler, cache, worker and model, stepped by the test itself."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch

from engine.arena import ArenaMemory
from engine.core import EngineCore
from engine.errors import TandemError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.manager import KVCacheManager
from engine.kv_connector import Connector, LocalAdmission, SchedulerConnector, WorkerConnector
from engine.models.loader import CausalLM
from engine.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.step import ConnectorMeta, ScheduledRequest
from engine.types import GenerateOutput, GenerateRequest
from engine.worker.model_runner import ModelRunner
from tests.support.cache.recount import check_scheduler
from tests.support.nodes.cluster import Generation

MAX_LENGTH = 4096


class _Watch(SchedulerConnector):
    """The scheduler's side of a node that works alone, which looks when a step is planned."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        self._look()
        return ConnectorMeta()


class BareEngine:
    """Requests are named by the order in which they came; use as a context manager.

    `usage` and `running` are those of the last step when all that it needs was in use. On a regular
    exit nothing may be running or hold memory.
    """

    def __init__(
        self,
        model: CausalLM,
        plan: ArenaPlan,
        *,
        prefix_caching: bool = True,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 64,
    ) -> None:
        self.plan = plan
        self.done: dict[str, Generation] = {}
        self.failed: dict[str, TandemError] = {}
        self._arena = ArenaMemory(plan.arena_bytes)
        self._num_added = 0
        self.usage = 0.0
        self.running: set[str] = set()
        connector = Connector(LocalAdmission(), _Watch(self._look), WorkerConnector())
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.cache = KVCacheManager(plan, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(limits, self.cache, connector.scheduler)
        self.runner = ModelRunner(model, plan, self._arena)
        self._core = EngineCore(self.scheduler, self.runner, connector)

    def add(self, origin: GenerateRequest) -> str:
        """Puts a request into the queue; returns the name under which it will be in `done`."""
        request = Request.from_generate(
            origin, self.cache.hasher, max_model_len=MAX_LENGTH, eos_token_ids=frozenset()
        )
        request.request_id = str(self._num_added)
        self._num_added += 1
        self.done[request.request_id] = Generation([], [], GenerateOutput())
        self.scheduler.add(request)
        return request.request_id

    def step(self) -> None:
        """Runs one step of the engine and records its outputs in `done`."""
        news, _ = self._core.step()
        self.failed.update(news.errors)
        for name, output in news.outputs:
            mine = self.done[name]
            mine.token_ids += output.token_ids
            mine.logprobs += output.logprobs or ()
            mine.last = output
            mine.prompt_logprobs = output.prompt_logprobs or mine.prompt_logprobs

    def generate(self, *origins: GenerateRequest) -> list[Generation]:
        """Runs all prompts at once, to their ends."""
        names = [self.add(origin) for origin in origins]
        while self.scheduler.has_work:
            self.step()
        assert not self.failed.keys() & names
        return [self.done[name] for name in names]

    def _look(self) -> None:
        self.usage = self.cache.usage
        self.running = {request.request_id for request in self.scheduler._running}

    def __enter__(self) -> Self:
        torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._core.close()
        self._arena.close()
        if kind is None:
            check_scheduler(self.scheduler)
            assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
            assert self.cache.usage == 0
