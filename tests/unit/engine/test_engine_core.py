"""One step of the engine: when the next one must follow at once."""

from typing import Any, cast

from engine.core import EngineCore
from engine.errors import GrammarError
from engine.grammars.matcher import MaskNews, Matcher
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.coverage import Coverage
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup
from engine.kv_connector import (
    Connector,
    FirstToken,
    LocalAdmission,
    Match,
    SchedulerConnector,
    WorkerConnector,
)
from engine.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.step import BlockLoad, ConnectorOutput, ModelRunnerOutput, SampledToken, SchedulerOutput
from engine.types import GenerateRequest, SamplingParams
from engine.worker.model_runner import StepResults


class _Elsewhere(SchedulerConnector):
    """Every prompt is computed elsewhere."""

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        return Match(Coverage.of(request.num_prompt_tokens))

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        return 1


class _Loads(WorkerConnector):
    """Reports what the test puts into `loaded`."""

    def __init__(self) -> None:
        self.loaded: tuple[str, ...] = ()

    def get_finished(self) -> ConnectorOutput:
        loaded, self.loaded = self.loaded, ()
        return ConnectorOutput(loaded)


class _NoModel:
    """Always the same token."""

    def prepare(self, output: SchedulerOutput) -> None:
        """Nothing to prepare."""

    def launch(self, output: SchedulerOutput) -> StepResults:
        names = [item.request_id for item in output.scheduled]
        return StepResults(lambda: ModelRunnerOutput(dict.fromkeys(names, SampledToken(7, None))))


def test_a_finished_load_is_followed_by_a_step_although_none_was_computed() -> None:
    group = KVCacheGroup(FullAttentionSpec(1, 8, "float32"), layers=(0,))
    cache = KVCacheManager(plan_arena((group,), 4, 1 << 20))
    sides = Connector(LocalAdmission(), _Elsewhere(), loads := _Loads())
    scheduler = Scheduler(SchedulerConfig(), cache, sides.scheduler)
    core = EngineCore(scheduler, cast(Any, _NoModel()), sides)
    sampling = SamplingParams(max_tokens=2)
    origin = GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=sampling)
    scheduler.add(
        Request.from_generate(origin, cache.hasher, max_model_len=64, eos_token_ids=frozenset()),
        FirstToken(3),
    )
    news, may_go_on = core.step()
    assert [name for name, _ in news.outputs] == ["r"]  # its first token came with it
    assert not may_go_on  # it loads: whoever ends the load wakes the engine

    loads.loaded = ("r",)
    news, may_go_on = core.step()
    assert not news.outputs
    assert may_go_on

    news, _ = core.step()
    assert [output.token_ids for _, output in news.outputs] == [(7,)]
    _, may_go_on = core.step()
    assert not may_go_on


def test_a_step_leaves_out_whose_mask_is_late_and_ends_whose_grammar_failed() -> None:
    group = KVCacheGroup(FullAttentionSpec(1, 8, "float32"), layers=(0,))
    cache = KVCacheManager(plan_arena((group,), 4, 1 << 20))
    sides = Connector(LocalAdmission(), SchedulerConnector(), WorkerConnector())
    scheduler = Scheduler(SchedulerConfig(), cache, sides.scheduler)
    core = EngineCore(scheduler, cast(Any, _NoModel()), sides)
    asked: list[int] = []
    late = Matcher(MaskNews(), asked.append, lambda: None)

    def add(name: str, matcher: Matcher | None) -> Request:
        sampling = SamplingParams(max_tokens=20)
        origin = GenerateRequest(request_id=name, prompt_token_ids=(1, 2), sampling=sampling)
        request = Request.from_generate(
            origin, cache.hasher, max_model_len=64, eos_token_ids=frozenset(), matcher=matcher
        )
        scheduler.add(request)
        return request

    def served() -> list[str]:
        news, _ = core.step()
        return [name for name, _ in news.outputs]

    add("plain", None)
    bound = add("bound", late)
    assert served() == ["plain"]  # not begun: nothing is known of its first token
    late.arrived(b"\xff\xff")
    assert served() == ["plain", "bound"] and asked == [7]
    assert served() == ["plain"] == served()
    late.arrived(b"\xff\xff")
    assert served() == ["plain", "bound"] and asked == [7, 7]

    late.error = GrammarError("too much")
    news, _ = core.step()
    assert [(name, str(error)) for name, error in news.errors] == [("bound", "too much")]
    assert bound.is_finished and bound.blocks is None
    waiting = add("refused before it began", late)
    news, _ = core.step()
    assert waiting.is_finished and len(news.errors) == 1
    scheduler.abort("plain")
    assert cache.usage == 0.0
