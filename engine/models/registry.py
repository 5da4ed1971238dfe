"""The families by name: the torch half of `engine/model_configs/registry.py`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from engine.forward import ForwardBatch, LayerCaches
from engine.layers.weights import Weights
from engine.model_configs.model_config import ModelConfig
from engine.models import bamba, gemma3, granite_moe_hybrid, nemotron_h, qwen3, qwen3_5


class CausalLM(Protocol):
    """A model of any family."""

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [tokens, hidden] of the batch; writes K/V and states into `caches`."""

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """float32 logits [rows, vocab] of some rows of hidden states."""


class Family(Protocol):
    """One module of this folder."""

    def rename(self, stored_name: str, /) -> str | None:
        """The name by which `build` takes a stored tensor; None: it is skipped by design."""

    def build(self, config: ModelConfig, weights: Weights, /) -> CausalLM:
        """Raises CheckpointError for tensors that are missing or misshapen."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bamba": bamba,
        "falcon_h1": bamba,
        "gemma3": gemma3,
        "granite_moe_hybrid": granite_moe_hybrid,
        "nemotron_h": nemotron_h,
        "qwen3": qwen3,
        "qwen3_5": qwen3_5,
    }
)
