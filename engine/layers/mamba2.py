"""The Mamba2 mixer: projection, causal convolution, state space scan, gated norm, projection.

Knows where states lie only through StateCache and StateIndex; knows nothing of requests.
"""

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward import ForwardBatch, StateCache, StateIndex
from engine.layers.linear import Linear
from engine.layers.mamba2_gate import OutputGate
from engine.layers.projection import load_linear, per_output
from engine.layers.weights import Weights
from engine.model_configs.mamba2 import Mamba2Config
from engine.ops.causal_conv1d.fast import conv_chunk, conv_step, tap_major
from engine.ops.ssd.fast import ssd_chunk, ssd_step


class Mamba2:
    """Tensors `<prefix>.{in_proj, conv1d, A_log, D, dt_bias, norm, out_proj}`.

    in_proj gives z, x, B, C, dt side by side. dt, the scan and the norm are float32 in any model.
    """

    def __init__(
        self, config: Mamba2Config, weights: Weights, prefix: str, *, hidden: int, eps: float
    ) -> None:
        self.config = config
        inner, conv, heads = config.inner_size, config.conv_dim, config.num_heads
        self.in_proj = _in_proj(config, weights, prefix, hidden=hidden)
        self.out_proj = load_linear(
            weights,
            prefix,
            {"out_proj": hidden},
            inputs=inner,
            bias=config.out_proj_bias,
            output_scale=config.output_scale,
        )
        conv_weight = weights.take(f"{prefix}.conv1d.weight", (conv, 1, config.conv_kernel))
        self.conv_weight = tap_major(conv_weight[:, 0])
        self.conv_bias = (
            weights.take(f"{prefix}.conv1d.bias", (conv,)) if config.conv_bias else None
        )
        self.a = -torch.exp(weights.take(f"{prefix}.A_log", (heads,), torch.float32))
        self.d = weights.take(f"{prefix}.D", (heads,), torch.float32).unsqueeze(-1)
        self.dt_bias = weights.take(f"{prefix}.dt_bias", (heads,), torch.float32)
        self.gate = OutputGate(config, weights, prefix, eps=eps)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        cache: StateCache,
        *,
        index: StateIndex,
        batch: ForwardBatch,
    ) -> Tensor:
        """residual + mixer(x), both [T, hidden]; the sequences' states move on in `cache`."""
        config = self.config
        sizes = [config.inner_size, config.conv_dim, config.num_heads]
        z, rows, dt = torch.split(self.in_proj(x), sizes, dim=-1)
        y = self._scan(rows, self._time_steps(dt), cache, index, batch)
        return self.out_proj.add_to(residual, self.gate(y, z).to(x.dtype))

    def _time_steps(self, dt: Tensor) -> Tensor:
        dt = F.softplus(dt + self.dt_bias)
        low, high = self.config.time_step_limit
        return dt if low <= 0.0 and high == inf else dt.clamp_(low, high)

    def _scan(
        self, rows: Tensor, dt: Tensor, cache: StateCache, index: StateIndex, batch: ForwardBatch
    ) -> Tensor:
        """rows [T, conv_dim], dt [T, heads] -> float32 [T, heads, head_dim]."""
        decodes = batch.num_decodes
        lens = batch.query_lens[decodes:]
        if not lens:
            return self._decode(rows, dt, cache, index)
        y = self._prefill(rows[decodes:], dt[decodes:], cache, index=index, lens=lens)
        if not decodes:
            return y
        return torch.cat([self._decode(rows[:decodes], dt[:decodes], cache, index), y])

    def _decode(self, rows: Tensor, dt: Tensor, cache: StateCache, index: StateIndex) -> Tensor:
        run = index.decode_run
        if run is not None:
            return self._step(rows, dt, cache.conv[run], cache.temporal[run])
        units = index.units[: rows.shape[0]]
        conv, temporal = _gather(cache.conv, units), _gather(cache.temporal, units)
        y = self._step(rows, dt, conv, temporal)
        cache.conv.index_copy_(0, units, conv)
        cache.temporal.index_copy_(0, units, temporal)
        return y

    def _step(self, rows: Tensor, dt: Tensor, conv: Tensor, temporal: Tensor) -> Tensor:
        x, b, c = self._split(conv_step(rows, conv, self.conv_weight, self.conv_bias))
        state = temporal.float()
        y = ssd_step(x, dt, self.a, b, c, state)
        if state is not temporal:
            temporal.copy_(state)
        return y.addcmul_(x, self.d)

    def _prefill(
        self, rows: Tensor, dt: Tensor, cache: StateCache, *, index: StateIndex, lens: list[int]
    ) -> Tensor:
        units = index.units[-len(lens) :]
        exports = [(export.segment, export.offset) for export in index.exports]
        conv, state = _gather(cache.conv, units), _gather(cache.temporal, units).float()
        mixed, conv, conv_rows = conv_chunk(
            rows, lens, conv, self.conv_weight, self.conv_bias, exports=exports
        )
        x, b, c = self._split(mixed)
        y, state, states = ssd_chunk(
            x, dt, self.a, b, c, query_lens=lens, initial=state, exports=exports
        )
        cache.conv.index_copy_(0, units, conv)
        cache.temporal.index_copy_(0, units, state.to(cache.temporal.dtype))
        for export, kept, state in zip(index.exports, conv_rows, states, strict=True):
            cache.conv[export.unit] = kept
            cache.temporal[export.unit] = state
        return y.addcmul_(x, self.d)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, heads, head_dim], b and c [T, groups, state_size]."""
        config = self.config
        inner, shared = config.inner_size, config.n_groups * config.state_size
        x, b, c = torch.split(mixed, [inner, shared, shared], dim=-1)
        by_group = (-1, config.n_groups, config.state_size)
        return x.view(-1, config.num_heads, config.head_dim), b.view(by_group), c.view(by_group)


def _in_proj(config: Mamba2Config, weights: Weights, prefix: str, *, hidden: int) -> Linear:
    runs = list(zip(config.projected_scales, config.projected_sizes, strict=True))
    even = all(scale == 1.0 for scale in config.projected_scales)
    return load_linear(
        weights,
        prefix,
        {"in_proj": sum(config.projected_sizes)},
        inputs=hidden,
        bias=config.in_proj_bias,
        input_scale=config.input_scale,
        output_scale=1.0 if even else per_output(runs, weights.device),
    )


def _gather(states: Tensor, units: Tensor) -> Tensor:
    """Copies of some units; a flat row per unit makes it a plain copy on CPU."""
    return states.flatten(1).index_select(0, units).view(-1, *states.shape[1:])
