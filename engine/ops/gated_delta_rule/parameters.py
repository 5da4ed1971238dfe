"""The weights of a layer's gated delta rule: how it comes to decays and rates of writing."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True, kw_only=True)
class DeltaRuleParameters:
    """The logarithm of a decay is softplus(a + dt_bias) * rate; beta is sigmoid(b) * `beta_scale`.

    rate float32 [Hv], negative; dt_bias float32 [Hv], or [Hv, dk] of decays by key channel.
    """

    rate: Tensor
    dt_bias: Tensor
    beta_scale: float = 1.0
