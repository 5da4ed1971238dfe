"""Settings of rotary position embedding. Torch-free.

A kind of rope is a scaling of the frequencies theta^(-2i/d), and a factor on cosines and sines.
Two kinds of the hub depend on the length of the whole text. K/V that are kept cannot: a prefix is
shared by texts of any length. "dynamic" changes nothing up to `max_position_embeddings`, and no
text is longer; "longrope" is read where its short factors are right for every text.
"""

from dataclasses import dataclass
from math import log, sqrt
from typing import Final

from engine.errors import CheckpointError
from engine.model_configs.config_reader import ConfigReader

UNSCALED: Final = ("default", "mrope", "dynamic")
"""Kinds whose frequencies are not scaled; positions of text are equal in all parts of mrope."""
KINDS: Final = (*UNSCALED, "linear", "yarn", "llama3", "longrope")


@dataclass(slots=True, frozen=True)
class LinearScaling:
    """All frequencies are divided by `factor`, which stretches positions."""

    factor: float


@dataclass(slots=True, frozen=True, kw_only=True)
class YarnScaling:
    """Low frequencies are divided by `factor`, high ones kept; between them is a ramp.

    YaRN, arXiv 2309.00071. The ramp is from `beta_fast` rotations in `original_positions` down to
    `beta_slow`; `truncate`: its ends are whole channels.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(slots=True, frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones kept; between them is a ramp.

    Llama 3, arXiv 2407.21783. The ramp is from `high` rotations in `original_positions` down to
    `low`.
    """

    factor: float
    original_positions: int
    low: float
    high: float


@dataclass(slots=True, frozen=True)
class ChannelScaling:
    """Every frequency is divided by its own of `rotary_dim` / 2 `factors`.

    LongRoPE, arXiv 2402.13753, for texts of up to the original length.
    """

    factors: tuple[float, ...]


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling | ChannelScaling


@dataclass(slots=True, frozen=True)
class RopeConfig:
    """Base `theta`, and how many leading channels of each head are rotated.

    `scaling` changes the frequencies (None: they are theta^(-2i/d)). `magnitude` multiplies
    cosines and sines. `wide`: rotated in float32 whatever the model computes in.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    magnitude: float = 1.0
    wide: bool = False


def read_rope(reader: ConfigReader, head_dim: int, partial: float = 1.0) -> RopeConfig:
    """Reads `rope_parameters` and `rope_scaling`, else top-level `rope_theta`.

    `partial` is the family's default for `partial_rotary_factor`. Raises CheckpointError for kinds
    that are not of `KINDS`.
    """
    # transformers 5 writes the first, 4 wrote the second, and before that the fields stood alone.
    # The second is also what people add to either to stretch a model, so it wins.
    fields = reader.get("rope_parameters", dict, {}) | reader.get("rope_scaling", dict, {})
    nested = next((key for key, value in fields.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise CheckpointError(
            f"{reader.source}: 'rope_parameters' has {fields[nested]!r} for {nested!r}; this "
            "architecture has one kind of rope in all layers"
        )
    return rope_of(
        ConfigReader(fields, f"{reader.source}: rope"),
        reader,
        head_dim,
        theta=reader.get("rope_theta", float, 10000.0),
        partial=reader.get("partial_rotary_factor", float, partial),
    )


def rope_of(
    settings: ConfigReader,
    model: ConfigReader,
    head_dim: int,
    *,
    theta: float,
    partial: float = 1.0,
) -> RopeConfig:
    """One object of rope `settings`, of a kind of layer of `model`.

    `theta` and `partial` are for settings that do not say them. Raises CheckpointError.
    """
    theta = settings.get("rope_theta", float, theta)
    if theta <= 1.0:
        raise CheckpointError(f"{settings.source}: 'rope_theta' is {theta}, expected more than 1")
    partial = settings.get("partial_rotary_factor", float, partial)
    dim = int(head_dim * partial)
    if not 0 < dim <= head_dim or dim % 2:
        raise CheckpointError(
            f"{settings.source}: partial_rotary_factor {partial} would rotate {dim} channels "
            f"of {head_dim}; it must be an even number of them"
        )
    kind: str = settings.get("rope_type", str, settings.get("type", str, "default"))
    if kind not in KINDS:
        raise CheckpointError(
            f"{settings.source}: rope_type {kind!r} is not supported; supported: {', '.join(KINDS)}"
        )
    if kind == "linear":
        return RopeConfig(theta, dim, LinearScaling(_positive(settings, "factor")))
    if kind == "llama3":
        return RopeConfig(theta, dim, _llama3(settings, model))
    if kind == "yarn":
        scaling = _yarn(settings, model)
        return RopeConfig(theta, dim, scaling, _yarn_magnitude(settings, scaling.factor))
    if kind == "longrope":
        return RopeConfig(theta, dim, *_longrope(settings, model, dim))
    return RopeConfig(theta, dim)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's growth of attention with the factor of a context's length (its section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * log(factor) + 1.0


def _positive(settings: ConfigReader, key: str, default: float | None = None) -> float:
    value: float = (
        settings.require(key, float) if default is None else settings.get(key, float, default)
    )
    if value <= 0.0:
        raise CheckpointError(f"{settings.source}: {key!r} is {value}, not positive")
    return value


def _original_positions(settings: ConfigReader, model: ConfigReader) -> int:
    """The context of pretraining; a model's own field wins over that in the settings of its rope.

    So transformers reads both (modeling_rope_utils.py).
    """
    key = "original_max_position_embeddings"
    found = model.optional_size(key) or settings.optional_size(key)
    return found or model.size("max_position_embeddings")


def _factor(settings: ConfigReader, model: ConfigReader, original: int) -> float:
    """How much longer contexts are than `original`, from the model's sizes where it is not said."""
    if settings.fields.get("factor") is not None:
        return _positive(settings, "factor")
    longest: int = model.size("max_position_embeddings")
    return longest / original


def _llama3(settings: ConfigReader, model: ConfigReader) -> Llama3Scaling:
    low, high = _positive(settings, "low_freq_factor"), _positive(settings, "high_freq_factor")
    if low >= high:
        raise CheckpointError(
            f"{settings.source}: 'low_freq_factor' {low} is not below 'high_freq_factor' {high}"
        )
    return Llama3Scaling(
        factor=_positive(settings, "factor"),
        original_positions=_original_positions(settings, model),
        low=low,
        high=high,
    )


def _yarn(settings: ConfigReader, model: ConfigReader) -> YarnScaling:
    original = _original_positions(settings, model)
    return YarnScaling(
        factor=_factor(settings, model, original),
        original_positions=original,
        beta_fast=_positive(settings, "beta_fast", 32.0),
        beta_slow=_positive(settings, "beta_slow", 1.0),
        truncate=settings.get("truncate", bool, True),
    )


def _yarn_magnitude(settings: ConfigReader, factor: float) -> float:
    if settings.fields.get("attention_factor") is not None:
        return _positive(settings, "attention_factor")
    mscale = settings.get("mscale", float, 0.0)
    over_all = settings.get("mscale_all_dim", float, 0.0)
    if mscale and over_all:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, over_all)
    return yarn_mscale(factor)


def _longrope(
    settings: ConfigReader, model: ConfigReader, dim: int
) -> tuple[ChannelScaling, float]:
    original = _original_positions(settings, model)
    factor = _factor(settings, model, original)
    longest: int = model.size("max_position_embeddings")
    if longest > original:
        raise CheckpointError(
            f"{settings.source}: rope_type 'longrope' has other factors for texts of more than "
            f"{original} tokens, and K/V of a shared prefix cannot have both; set "
            f"'max_position_embeddings' {longest} to {original}, and 'factor' to {factor}, to "
            "serve the shorter ones"
        )
    factors = settings.numbers("short_factor", dim // 2, 1.0)
    if min(factors) <= 0.0:
        raise CheckpointError(
            f"{settings.source}: 'short_factor' has numbers that are not positive"
        )
    # A context of one token cannot have grown: its logarithm is nothing to divide by.
    grown = sqrt(1.0 + log(factor) / log(original)) if factor > 1.0 and original > 1 else 1.0
    return ChannelScaling(factors), _positive(settings, "attention_factor", grown)
