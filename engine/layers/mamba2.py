"""The Mamba2 mixer: projection, causal convolution, state space scan, gated norm, projection."""

import torch
from torch import Tensor

from engine.layers.linear import load_linear, per_output
from engine.layers.mixer import CacheKey, ForwardPass
from engine.model_configs.model_config import ModelConfig
from engine.model_configs.recurrent import Gating, Mamba2Config
from engine.ops.ssd.parameters import SSDParameters
from engine.weights.weights import Weights


class Mamba2:
    """Tensors `{in_proj, conv1d, A_log, D, dt_bias, norm, out_proj}`; no norm for GATE_ONLY.

    in_proj gives z, x, B, C, dt side by side. dt, the scan and the norm are float32 in any model.
    """

    def __init__(
        self, config: Mamba2Config, weights: Weights, model: ModelConfig, key: CacheKey
    ) -> None:
        self.config = config
        self.key = key
        self.ops = weights.ops
        inner, conv, heads = config.inner_size, config.conv_dim, config.num_heads
        runs = list(zip(config.projected_scales, config.projected_sizes, strict=True))
        self.in_proj = load_linear(
            weights,
            {"in_proj": sum(config.projected_sizes)},
            inputs=model.hidden_size,
            bias=config.in_proj_bias,
            input_scale=config.input_scale,
            output_scale=per_output(runs, weights.device),
        )
        self.out_proj = load_linear(
            weights,
            {"out_proj": model.hidden_size},
            inputs=inner,
            bias=config.out_proj_bias,
            output_scale=config.output_scale,
        )
        # Stored [channels, 1, K] for torch's conv1d; the operators want token-major [K, channels].
        taps = weights.take("conv1d.weight", (conv, 1, config.conv_kernel))
        self.conv_weight = taps[:, 0].t().contiguous()
        self.conv_bias = weights.take("conv1d.bias", (conv,)) if config.conv_bias else None
        self.parameters = SSDParameters(
            a=-torch.exp(weights.take("A_log", (heads,), torch.float32)),
            dt_bias=weights.take("dt_bias", (heads,), torch.float32),
            limits=config.time_step_limit,
            d=weights.take("D", (heads,), torch.float32),
        )
        by_group: Tensor | None = None
        if config.gating is not Gating.GATE_ONLY:
            by_group = weights.take("norm.weight", (inner,)).view(config.n_groups, -1)
        eps = model.rms_norm_eps
        self.gated_norm = self.ops.gated_norm(by_group, eps, gating=config.gating)

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        config = self.config
        (conv, temporal), index = step.states(self.key)
        sizes = [config.inner_size, config.conv_dim, config.num_heads]
        z, mixed, dt = self.in_proj(x).split_with_sizes(sizes, dim=-1)
        # x, B and C pass the convolution together; z and dt do not.
        mixed = self.ops.causal_conv1d(mixed, conv, index, self.conv_weight, self.conv_bias)
        shared = config.n_groups * config.state_size
        u, b, c = mixed.split_with_sizes([config.inner_size, shared, shared], dim=-1)
        u = u.view(-1, config.num_heads, config.head_dim)
        by_group = (-1, config.n_groups, config.state_size)
        b, c = b.view(by_group), c.view(by_group)
        y = self.ops.ssd(u, dt, b, c, temporal, index, parameters=self.parameters)
        return self.out_proj(self.gated_norm(y, z), residual)
