"""Architecture name to model class: the torch half of `model_configs/registry.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from engine.forward import ForwardBatch, LayerCaches
from engine.layers.weights import Weights
from engine.model_configs.registry import CONFIGS, FromReader
from engine.models import (
    bamba,
    falcon_h1,
    gemma3,
    granite_moe_hybrid,
    nemotron_h,
    qwen3,
    qwen3_5,
)


class CausalLM(Protocol):
    """What every family provides."""

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [tokens, hidden] of the batch; writes K/V and states into `caches`."""

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """float32 logits [rows, vocab] of some rows of hidden states."""


@dataclass(slots=True, frozen=True)
class Family:
    """How one architecture is read and built: its config, its tensor names, its class.

    `build` takes the config that `from_reader` makes; the registry pairs them, hence the Any.
    """

    from_reader: FromReader
    rename: Callable[[str], str | None]
    build: Callable[[Any, Weights], CausalLM]


def _family(
    name: str, rename: Callable[[str], str | None], build: Callable[..., CausalLM]
) -> Family:
    return Family(CONFIGS[name], rename, build)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen3ForCausalLM": _family("Qwen3ForCausalLM", qwen3.rename, qwen3.Qwen3),
        "Qwen3_5ForCausalLM": _family("Qwen3_5ForCausalLM", qwen3_5.rename, qwen3_5.Qwen3_5),
        "Qwen3_5ForConditionalGeneration": _family(
            "Qwen3_5ForConditionalGeneration", qwen3_5.rename, qwen3_5.Qwen3_5
        ),
        "NemotronHForCausalLM": _family(
            "NemotronHForCausalLM", nemotron_h.rename, nemotron_h.NemotronH
        ),
        "Gemma3ForCausalLM": _family("Gemma3ForCausalLM", gemma3.rename, gemma3.Gemma3),
        "Gemma3ForConditionalGeneration": _family(
            "Gemma3ForConditionalGeneration", gemma3.rename, gemma3.Gemma3
        ),
        "GraniteMoeHybridForCausalLM": _family(
            "GraniteMoeHybridForCausalLM", granite_moe_hybrid.rename, granite_moe_hybrid.build
        ),
        "FalconH1ForCausalLM": _family("FalconH1ForCausalLM", falcon_h1.rename, falcon_h1.build),
        "BambaForCausalLM": _family("BambaForCausalLM", bamba.rename, bamba.build),
    }
)
