"""The gated short convolution of LFM2: one input product, two gates and a convolution in between.

Reads and writes its state in the cache only, so prefill, chunked prefill and decode are one thing.
"""

from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import CacheKey, ForwardPass
from engine.model_configs.model_config import ModelConfig
from engine.model_configs.recurrent import ShortConvConfig
from engine.weights.weights import Weights


class ShortConv:
    """Tensors `{in_proj,conv,out_proj}.{weight,bias}`; in_proj gives B, C, x side by side.

    The result is out_proj(C * conv(B * x)), as in the LFM2 report (arXiv 2511.23404); a state is
    the last inputs of the convolution.
    """

    def __init__(
        self, config: ShortConvConfig, weights: Weights, model: ModelConfig, key: CacheKey
    ) -> None:
        self.key = key
        self.ops = weights.ops
        inner, hidden = config.channels, model.hidden_size
        self.in_proj = load_linear(weights, {"in_proj": 3 * inner}, inputs=hidden, bias=config.bias)
        self.out_proj = load_linear(weights, {"out_proj": hidden}, inputs=inner, bias=config.bias)
        taps = weights.take("conv.weight", (inner, 1, config.conv_kernel))
        self.conv_weight = taps[:, 0].t().contiguous()
        self.conv_bias = weights.take("conv.bias", (inner,)) if config.bias else None

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        (conv,), index = step.states(self.key)
        before, after, u = self.in_proj(x).chunk(3, dim=-1)
        u = self.ops.gate(u, before, sigmoid=False)
        u = self.ops.causal_conv1d(u, conv, index, self.conv_weight, self.conv_bias, silu=False)
        return self.out_proj(self.ops.gate(u, after, sigmoid=False), residual)
