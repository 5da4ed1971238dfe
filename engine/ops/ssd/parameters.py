"""The weights of a layer's state space duality, and how it comes to its time steps."""

from dataclasses import dataclass
from math import inf

from torch import Tensor


@dataclass(slots=True, frozen=True, kw_only=True)
class SSDParameters:
    """All float32 [H]. A state decays by exp(dt a), a < 0; the input is added to y, times `d`.

    dt is softplus(dt + dt_bias) within `limits`, of the dt [T, H] that the operator is given;
    without one all steps are 1.
    """

    a: Tensor
    dt_bias: Tensor | None = None
    limits: tuple[float, float] = (0.0, inf)
    d: Tensor | None = None
