"""A whole layer as in Qwen: attention, then the gated feed-forward block, each on a residual."""

from torch import Tensor

from engine.forward import AttentionCache, AttentionIndex, ForwardBatch
from engine.layers.mlp import GatedMLP
from engine.layers.norm import load_norm
from engine.layers.qk_norm_attention import AttentionShape, QKNormAttention
from engine.layers.weights import Weights
from engine.ops.scratch import Scratch


class AttentionLayer:
    """Tensors `<prefix>.{input_layernorm, self_attn.*, post_attention_layernorm, mlp.*}`."""

    def __init__(
        self,
        shape: AttentionShape,
        weights: Weights,
        prefix: str,
        *,
        intermediate: int,
        scratch: Scratch,
    ) -> None:
        size, eps, offset = shape.hidden, shape.eps, shape.norm_offset
        self.norm = load_norm(weights, f"{prefix}.input_layernorm", size, eps=eps, offset=offset)
        self.attention = QKNormAttention(shape, weights, f"{prefix}.self_attn", scratch=scratch)
        post = f"{prefix}.post_attention_layernorm"
        self.mlp_norm = load_norm(weights, post, size, eps=eps, offset=offset)
        self.mlp = GatedMLP(weights, f"{prefix}.mlp", size, intermediate)

    def __call__(
        self,
        x: Tensor,
        rotary: Tensor,
        cache: AttentionCache,
        *,
        index: AttentionIndex,
        batch: ForwardBatch,
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; `rotary` is what `Rotary.select` gave."""
        x = self.attention(self.norm(x), x, rotary, cache=cache, index=index, batch=batch)
        return self.mlp(self.mlp_norm(x), x)
