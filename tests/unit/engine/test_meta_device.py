"""A forward pass on torch's `meta` device, whose tensors have no numbers that a host could ask for.

On a real device each question would wait for all that is queued there, once per layer.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.compute_config import ComputeConfig
from engine.families.registry import read_config
from engine.forward import AttentionIndex, ForwardBatch, GroupIndex
from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.kv_cache.spec import MambaSpec
from engine.models.loader import load_model
from engine.step import SamplingInput, ScheduledRequest, StateSave
from engine.types import SamplingParams
from engine.worker.input_batch import InputBatcher
from engine.worker.kv_caches import layer_caches
from tests.support.nodes.cluster import checkpoints

META = torch.device("meta")
__all__ = ["checkpoints"]


def test_a_pass_of_any_family_asks_its_device_for_nothing(checkpoints: dict[str, Path]) -> None:
    """Decodes beside segments, one of which keeps a state on its way."""
    for folder in checkpoints.values():
        config = read_config(folder, "bfloat16")
        model = load_model(folder, config, META, compute=ComputeConfig(kernels="torch"))
        plan = plan_arena(config.groups, 16, 4 << 20)
        caches = layer_caches(torch.empty(plan.arena_bytes, dtype=torch.uint8, device=META), plan)
        batch = there(InputBatcher(plan, torch.device("cpu")).build(requests(plan)))
        with torch.inference_mode():
            hidden = model.forward(batch, caches)
            logits = model.logits(hidden[batch.logits_rows])
        assert logits.shape == (4, config.vocab_size)


def requests(plan: ArenaPlan) -> list[ScheduledRequest]:
    """Two decodes and two segments, decodes first; the first segment is cut by an export."""
    items = []
    for number, (context, length) in enumerate([(40, 1), (7, 1), (0, 70), (30, 3)]):
        tables = [
            [number] if isinstance(group.spec, MambaSpec) else list(range(5))
            for group in plan.groups
        ]
        saves = (StateSave(66, dict.fromkeys(plan.state_groups, 9)),) if length == 70 else ()
        sampling = SamplingInput(SamplingParams(), context + length)
        tokens = [5] * length
        items.append(ScheduledRequest(str(number), tokens, context, tables, sampling, saves))
    return items


def there(batch: ForwardBatch) -> ForwardBatch:
    """The same batch on the device."""

    def moved(x: Tensor) -> Tensor:
        return x.to(META)

    def index(one: GroupIndex) -> GroupIndex:
        if isinstance(one, AttentionIndex):
            tables, slots = moved(one.block_tables), moved(one.slot_mapping)
            return AttentionIndex(tables, slots, moved(one.positions), one.lens)
        return replace(one, units=moved(one.units))

    return ForwardBatch(
        token_ids=moved(batch.token_ids),
        positions=moved(batch.positions),
        lens=batch.lens,
        group_index=tuple(map(index, batch.group_index)),
        logits_rows=moved(batch.logits_rows),
    )
