"""The function between the products of an MLP, by torch."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor

from engine.model_configs.feed_forward import Activation


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Activation.SILU: F.silu,
        Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
        Activation.RELU2: _relu2,
    }
)


def make_activation(kind: Activation, *, gated: bool) -> Callable[[Tensor], Tensor]:
    """See `backend.MakeActivation`."""
    function = FUNCTIONS[kind]
    return partial(_gated, function) if gated else function


def _gated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(gate).mul_(up)
