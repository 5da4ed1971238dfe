"""The phase `parity`: nodes on the device beside the same nodes on the CPU, both in float32."""

import asyncio
from pathlib import Path

from benchmarks.gpu.asking import (
    GREEDY,
    LENGTHS,
    SAMPLED,
    Answer,
    Difference,
    ask,
    node,
    prompt_of,
    request_of,
)
from benchmarks.gpu.checkpoints import small
from benchmarks.gpu.sheet import Setting, Sheet
from benchmarks.support.small_models import configs

FAMILIES = tuple(configs(1))
ALLOWED = 2e-3
SIXTEEN_BITS = ("qwen3_5", "nemotron_h")


def run(sheet: Sheet, setting: Setting) -> None:
    """Each family by itself."""
    for family in FAMILIES[:2] if setting.quick else FAMILIES:
        with sheet.attempt(family):
            asyncio.run(_family(sheet, setting, family))


async def _family(sheet: Sheet, setting: Setting, family: str) -> None:
    folder = small(family, setting.models)
    lengths = LENGTHS[:3] if setting.quick else LENGTHS
    requests = [
        request_of(prompt_of(length), sampling)
        for sampling in (GREEDY, SAMPLED)
        for length in lengths
    ]
    crowd = [request_of(prompt_of(20 + 37 * i, salt=i), GREEDY) for i in range(8)]
    async with node(folder, "cpu") as here:
        truth = [await ask(here.engine, request) for request in requests + crowd]
    async with node(folder, setting.device) as there:
        found = [await ask(there.engine, request) for request in requests]
        _tell(sheet, f"{family}, greedy and sampled, one by one", found, truth=truth)
        again = [await ask(there.engine, request) for request in requests]
        same = sum(a.logprobs == b.logprobs for a, b in zip(found, again, strict=True))
        figure = f"{same} of {len(found)} answers bit-equal"
        sheet.tell(f"{family}, the same once more", figure, "right" if same == len(found) else "")
        together = await asyncio.gather(*(ask(there.engine, request) for request in crowd))
        _tell(sheet, f"{family}, eight at once", list(together), truth=truth[len(requests) :])
    await _cached(sheet, setting, folder, family=family)
    if family in SIXTEEN_BITS:
        for device in ("cpu", setting.device):
            async with node(folder, device, dtype="bfloat16") as rounded:
                found = [await ask(rounded.engine, request) for request in requests]
            difference = Difference()
            for one, other in zip(found, truth, strict=False):
                difference.add(one, other)
            sheet.tell(f"{family}, bfloat16 on {device} beside float32", str(difference))


async def _cached(sheet: Sheet, setting: Setting, folder: Path, *, family: str) -> None:
    """A prompt that goes on after one that is cached, and the same without a cache."""
    longer = request_of((*prompt_of(300), *prompt_of(40, salt=5)), GREEDY)
    async with node(folder, setting.device) as plain:
        truth = await ask(plain.engine, longer)
    async with node(folder, setting.device, enable_prefix_caching=True) as caching:
        await ask(caching.engine, request_of(prompt_of(300), GREEDY))
        found = await ask(caching.engine, longer)
        twice = await ask(caching.engine, longer)
    hits = f"{found.last.num_cached_tokens} and {twice.last.num_cached_tokens} cached"
    _tell(sheet, f"{family}, prefix hits, {hits}", [found, twice], truth=[truth, truth])


def _tell(sheet: Sheet, case: str, found: list[Answer], *, truth: list[Answer]) -> None:
    difference = Difference()
    for one, other in zip(found, truth, strict=False):
        difference.add(one, other)
    is_right = not difference.wrong and difference.largest <= ALLOWED
    sheet.tell(case, str(difference), "right" if is_right else "wrong")
