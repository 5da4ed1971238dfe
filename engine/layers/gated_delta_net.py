"""The gated delta net mixer of Qwen3.5: one input product, conv, gated delta rule, gated norm.

Reads and writes its state in the cache only, so prefill, chunked prefill and decode are one thing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward import ForwardBatch, StateCache, StateIndex
from engine.layers.linear import Linear
from engine.layers.norm import GatedRMSNorm
from engine.layers.weights import Weights
from engine.model_configs.qwen3_5 import GatedDeltaNetShape
from engine.ops.causal_conv1d import fast as conv
from engine.ops.gated_delta_rule import fast as delta_rule
from engine.ops.scratch import Scratch


class GatedDeltaNet:
    """Tensors `<prefix>.{in_proj_*, conv1d, A_log, dt_bias, norm, out_proj}`."""

    def __init__(
        self, shape: GatedDeltaNetShape, weights: Weights, prefix: str, *, scratch: Scratch
    ) -> None:
        self.shape = shape
        self.scratch = scratch
        self.in_proj = _in_proj(shape, weights, prefix)
        taps = weights.take(f"{prefix}.conv1d.weight", (shape.conv_channels, 1, shape.kernel))
        self.conv_weight = conv.tap_major(taps[:, 0])
        per_head = (shape.value_heads,)
        self.rate = -weights.take(f"{prefix}.A_log", per_head, torch.float32).exp()
        self.dt_bias = weights.take(f"{prefix}.dt_bias", per_head, torch.float32)
        norm = weights.take(f"{prefix}.norm.weight", (shape.value_dim,))
        self.norm = GatedRMSNorm(norm, shape.eps)
        out = weights.take(f"{prefix}.out_proj.weight", (shape.hidden, shape.values))
        self.out_proj = Linear(out)
        self._splits = [shape.conv_channels, shape.values, shape.value_heads, shape.value_heads]
        self._qkv = [shape.keys, shape.keys, shape.values]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        cache: StateCache,
        *,
        index: StateIndex,
        batch: ForwardBatch,
    ) -> Tensor:
        """residual + mixer(x), both [T, hidden]; the states of the batch's sequences move on."""
        mixed, gate, b, a = self.in_proj(x).split_with_sizes(self._splits, dim=-1)
        decay = F.softplus(a.float() + self.dt_bias).mul_(self.rate)
        rates = torch.stack([decay, b.float().sigmoid()])
        decodes = batch.num_decodes
        parts = []
        if decodes:
            parts.append(self._decode(mixed[:decodes], rates[:, :decodes], cache, index=index))
        if decodes < len(batch.query_lens):
            lens = batch.query_lens[decodes:]
            tail = rates[:, decodes:]
            parts.append(self._prefill(mixed[decodes:], tail, cache, index=index, lens=lens))
        o = parts[0] if len(parts) == 1 else torch.cat(parts)
        gate = gate.view(o.shape)
        return self.out_proj.add_to(residual, self.norm(o, gate).reshape(x.shape[0], -1))

    def _decode(
        self, mixed: Tensor, rates: Tensor, cache: StateCache, *, index: StateIndex
    ) -> Tensor:
        run = index.decode_run
        if run is not None:
            return self._step(mixed, rates, cache.conv[run], temporal=cache.temporal[run])
        units = index.units[: mixed.shape[0]]
        conv_state, temporal = cache.conv[units], cache.temporal[units]
        o = self._step(mixed, rates, conv_state, temporal=temporal)
        cache.conv[units] = conv_state
        cache.temporal[units] = temporal
        return o

    def _step(
        self, mixed: Tensor, rates: Tensor, conv_state: Tensor, *, temporal: Tensor
    ) -> Tensor:
        mixed = conv.conv_step(mixed, conv_state, self.conv_weight, None)
        q, k, v = self._heads(mixed)
        return delta_rule.step(
            q, k, v, rates[0], beta=rates[1], state=temporal, scratch=self.scratch
        )

    def _prefill(
        self, mixed: Tensor, rates: Tensor, cache: StateCache, *, index: StateIndex, lens: list[int]
    ) -> Tensor:
        units = index.units[-len(lens) :]
        exports = [(export.segment, export.offset) for export in index.exports]
        mixed, conv_state, conv_rows = conv.conv_chunk(
            mixed, lens, cache.conv[units], self.conv_weight, None, exports=exports
        )
        q, k, v = self._heads(mixed)
        o, temporal, states = delta_rule.chunk(
            *(q, k, v, rates[0]),
            beta=rates[1],
            query_lens=lens,
            initial=cache.temporal[units],
            exports=exports,
        )
        cache.conv[units] = conv_state
        cache.temporal[units] = temporal
        for export, kept, state in zip(index.exports, conv_rows, states, strict=True):
            cache.conv[export.unit] = kept
            cache.temporal[export.unit] = state
        return o

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        q, k, v = mixed.split_with_sizes(self._qkv, dim=-1)
        return (
            q.view(-1, shape.key_heads, shape.key_dim),
            k.view(-1, shape.key_heads, shape.key_dim),
            v.view(-1, shape.value_heads, shape.value_dim),
        )


def _in_proj(shape: GatedDeltaNetShape, weights: Weights, prefix: str) -> Linear:
    """One product for q, k, v | gate | b | a."""
    rows = {
        "in_proj_qkv": shape.conv_channels,
        "in_proj_z": shape.values,
        "in_proj_b": shape.value_heads,
        "in_proj_a": shape.value_heads,
    }
    return Linear.merged(
        [weights.take(f"{prefix}.{name}.weight", (n, shape.hidden)) for name, n in rows.items()]
    )
