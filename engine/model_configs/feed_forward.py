"""Settings of the parts that keep nothing: MLPs and mixtures of experts. Torch-free."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.errors import CheckpointError
from engine.model_configs.config_reader import ConfigReader


class Activation(StrEnum):
    """The function between the products of an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU2 = "relu2"


@dataclass(slots=True, frozen=True, kw_only=True)
class MLPConfig:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where it is not `gated`.

    `gate_scale` multiplies gate(x), `output_scale` the result. With `token_gate` a token's result
    is multiplied by sigmoid(w x) too, a number.
    """

    intermediate_size: int
    bias: bool = False
    activation: Activation = Activation.SILU
    gated: bool = True
    gate_scale: float = 1.0
    output_scale: float = 1.0
    token_gate: bool = False


def read_mlp(reader: ConfigReader) -> MLPConfig:
    """Size and bias of the feed-forward blocks under their common names."""
    return MLPConfig(
        intermediate_size=reader.size("intermediate_size"),
        bias=reader.get("mlp_bias", bool, False),
    )


class Scoring(StrEnum):
    """The scores that a router makes of its logits: over all experts, or expert by expert."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(slots=True, frozen=True, kw_only=True)
class RouterConfig:
    """Every token goes to the `top_k` of `count` experts with the best scores.

    With `correction_bias` a learned number per expert is added to its score, for the choice alone
    (arXiv 2408.15664). Of `groups` of experts only the `top_groups` are open to a token, those with
    the largest sum of their two best scores (arXiv 2412.19437). An expert's share is its score,
    divided by the chosen ones' sum plus `floor` where they are to `renormalise`, times `scale`.
    """

    count: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalise: bool = True
    floor: float = 0.0
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(slots=True, frozen=True, kw_only=True)
class ExpertsConfig:
    """MLPs of `intermediate_size` channels, of which `router` chooses a few for each token.

    They are `gated` as in MLPConfig. With a `latent_size` they compute in a space of that many
    channels: a product leads into it, and another one back.
    """

    router: RouterConfig
    intermediate_size: int
    activation: Activation = Activation.SILU
    gated: bool = True
    latent_size: int | None = None


def read_router(
    reader: ConfigReader, count: str, top_k: str = "num_experts_per_tok", **own: Any
) -> RouterConfig:
    """A router of `own` settings; `count` and `top_k` are the keys of these numbers.

    Raises CheckpointError for numbers that do not fit.
    """
    experts, chosen = reader.size(count), reader.size(top_k)
    if not 0 < chosen <= experts:
        raise CheckpointError(f"{reader.source}: {top_k!r} is {chosen} of {experts} {count!r}")
    return RouterConfig(count=experts, top_k=chosen, **own)


def read_sigmoid_router(reader: ConfigReader, count: str) -> RouterConfig:
    """As `read_router`, with sigmoid scores in groups: DeepSeek-V3's router, under its names."""
    groups = reader.size("n_group", 1)
    top_groups = reader.size("topk_group", 1)
    router = read_router(
        reader,
        count,
        scoring=Scoring.SIGMOID,
        renormalise=reader.get("norm_topk_prob", bool, True),
        floor=1e-20,
        correction_bias=True,
        groups=groups,
        top_groups=top_groups,
        scale=reader.get("routed_scaling_factor", float, 1.0),
    )
    reader.require_divisor((count, router.count), ("n_group", groups))
    per_group = router.count // groups
    # A group's own score is the sum of its two best: one expert alone has none.
    fits = 0 < top_groups <= groups and router.top_k <= top_groups * per_group and per_group > 1
    if groups > 1 and not fits:
        raise CheckpointError(
            f"{reader.source}: {router.top_k} experts out of 'topk_group' {top_groups} of "
            f"'n_group' {groups} groups of {per_group} experts: these numbers do not fit"
        )
    return router
