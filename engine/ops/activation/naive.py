"""The function between the products of an MLP, as it is written."""

from math import pi

from torch import Tensor

from engine.model_configs.feed_forward import Activation


def activation(x: Tensor, kind: Activation, *, gated: bool) -> Tensor:
    """See `engine.ops.backend.MakeActivation`: x [T, U] -> [T, I], computed in float32."""
    wide = x.float()
    gate, up = wide.chunk(2, dim=-1) if gated else (wide, 1.0)
    match kind:
        case Activation.SILU:
            y = gate * gate.sigmoid()
        case Activation.GELU_TANH:
            inner = (2.0 / pi) ** 0.5 * (gate + 0.044715 * gate**3)
            y = 0.5 * gate * (1.0 + inner.tanh())
        case Activation.RELU2:
            y = gate.relu() ** 2
    return (y * up).to(x.dtype)
