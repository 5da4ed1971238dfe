"""G6 on a prefill node: what it finds of prompts that are made to fall between blocks."""

import msgspec

from benchmarks.cache.geometries import BLOCK_SIZE, GEOMETRIES
from benchmarks.cache.prefill_replay import POLICIES, PrefillNode, prompts_of
from benchmarks.workloads.adversarial import Case

ARENA_BYTES = 4 << 30


class Result(msgspec.Struct, frozen=True):
    """Tokens over all judged prompts of a case; `worst`: of one prompt."""

    case: str
    prompts: int
    ideal: int
    hits: int
    worst: int
    is_met: bool | None


def judge(case: Case) -> Result:
    """Serves every stream of the case under the default policy."""
    plan = GEOMETRIES["Qwen3.5-4B"].units(ARENA_BYTES)
    losses, ideals = [], 0
    for stream in case.streams:
        node = PrefillNode(plan, POLICIES["default"])
        prompts = prompts_of(stream.records, BLOCK_SIZE)
        hits = [node.serve(prompt) for prompt in prompts]
        judged = list(zip(prompts, hits, strict=True))[-stream.judged :]
        losses += [prompt.ideal - hit for prompt, hit in judged]
        ideals += sum(prompt.ideal for prompt, _ in judged)
    worst = max(losses, key=abs)
    is_met = None if case.max_loss is None else min(losses) >= 0 and worst <= case.max_loss
    return Result(case.name, len(losses), ideals, ideals - sum(losses), worst, is_met)
