"""The Mamba1 mixer: projection, causal convolution, selective scan, gate, projection."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import CacheKey, ForwardPass
from engine.model_configs.model_config import ModelConfig
from engine.model_configs.recurrent import Gating, Mamba1Config
from engine.weights.weights import Weights


class Mamba1:
    """Tensors `{in_proj, conv1d, x_proj, {dt,b,c}_layernorm, dt_proj, A_log, D, out_proj}`.

    in_proj gives x and z side by side, x_proj dt, B and C, which are normed. dt, the scan and the
    gate are float32 in any model.
    """

    def __init__(
        self, config: Mamba1Config, weights: Weights, model: ModelConfig, key: CacheKey
    ) -> None:
        self.config = config
        self.key = key
        self.ops = weights.ops
        hidden, inner, eps = model.hidden_size, config.inner_size, model.rms_norm_eps
        rank, states, bias = config.dt_rank, config.state_size, config.proj_bias
        self.in_proj = load_linear(weights, {"in_proj": 2 * inner}, inputs=hidden, bias=bias)
        self.x_proj = load_linear(weights, {"x_proj": rank + 2 * states}, inputs=inner)
        self.dt_proj = load_linear(weights, {"dt_proj": inner}, inputs=rank)
        self.out_proj = load_linear(weights, {"out_proj": hidden}, inputs=inner, bias=bias)
        taps = weights.take("conv1d.weight", (inner, 1, config.conv_kernel))
        self.conv_weight = taps[:, 0].t().contiguous()
        self.conv_bias = weights.take("conv1d.bias", (inner,)) if config.conv_bias else None
        # The operator wants the channels side by side: [states, channels].
        a_log = weights.take("A_log", (inner, states), torch.float32)
        self.a = -a_log.exp().t().contiguous()
        self.d = weights.take("D", (inner,), torch.float32)
        self.dt_bias = weights.take("dt_proj.bias", (inner,), torch.float32)
        dt_weight = weights.take("dt_layernorm.weight", (rank,))
        self.dt_norm = self.ops.norm(dt_weight, eps, weights.dtype)
        norms = [weights.take(f"{name}_layernorm.weight", (states,)) for name in "bc"]
        self.bc_norm = self.ops.norm(torch.stack(norms), eps, torch.float32)
        self.gate = self.ops.gated_norm(None, eps, gating=Gating.GATE_ONLY)

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        config = self.config
        (conv, temporal), index = step.states(self.key)
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u = self.ops.causal_conv1d(u, conv, index, self.conv_weight, self.conv_bias)
        sizes = [config.dt_rank, 2 * config.state_size]
        dt, bc = self.x_proj(u).split_with_sizes(sizes, dim=-1)
        dt = F.softplus(self.dt_proj(self.dt_norm(dt)) + self.dt_bias)
        b, c = self.bc_norm(bc.view(-1, 2, config.state_size)).unbind(1)
        y = self.ops.selective_scan(u, dt, self.a, b, c, temporal, index)
        return self.out_proj(self.gate(y.addcmul_(u, self.d), z), residual)
