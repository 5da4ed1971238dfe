"""Architecture name to model class: the torch half of `model_configs/registry.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from engine.forward import ForwardBatch, LayerCaches
from engine.layers.weights import Weights
from engine.model_configs.registry import CONFIGS, FromReader
from engine.models import nemotron_h, qwen3, qwen3_5


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
    }
)
