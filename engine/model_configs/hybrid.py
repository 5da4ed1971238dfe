"""What families of Mamba2 and grouped-query attention layers have in common. Torch-free."""

from dataclasses import dataclass

from engine.model_configs.attention import AttentionConfig
from engine.model_configs.base import ModelConfig
from engine.model_configs.mamba2 import Mamba2Config


@dataclass(slots=True, frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    """`layer_specs[i]` tells which mixers layer i has; `mamba` is None where no layer needs it.

    Embeddings are multiplied by `embedding_scale`, logits by `logits_scale`.
    """

    mamba: Mamba2Config | None
    attention: AttentionConfig
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
