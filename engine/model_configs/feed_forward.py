"""Settings of the parts that keep nothing: MLPs and mixtures of experts. Torch-free."""

from dataclasses import dataclass
from enum import StrEnum

from engine.model_configs.config_reader import ConfigReader


class Activation(StrEnum):
    """The function between the products of an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU2 = "relu2"


@dataclass(slots=True, frozen=True, kw_only=True)
class MLPConfig:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where it is not `gated`.

    `gate_scale` multiplies gate(x), `output_scale` the result.
    """

    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU
    gated: bool = True
    gate_scale: float = 1.0
    output_scale: float = 1.0


def read_mlp(reader: ConfigReader) -> MLPConfig:
    """Size and bias of the feed-forward blocks under their common names."""
    return MLPConfig(
        intermediate_size=reader.require("intermediate_size", int),
        bias=reader.get("mlp_bias", bool, False),
    )


@dataclass(slots=True, frozen=True, kw_only=True)
class ExpertsConfig:
    """`top_k` of `count` gated MLPs of `intermediate_size` channels, for each token.

    `output_scale` multiplies the result.
    """

    count: int
    top_k: int
    intermediate_size: int
    output_scale: float = 1.0
