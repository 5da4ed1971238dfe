"""Settings of rotary position embedding. Torch-free."""

from dataclasses import dataclass

from engine.errors import CheckpointError
from engine.model_configs.config_reader import ConfigReader


@dataclass(slots=True, frozen=True)
class RopeConfig:
    """Base `theta`, and how many leading channels of each head are rotated.

    Frequencies are divided by `factor` (rope type "linear", which stretches positions). `wide`:
    rotated in float32 whatever the model computes in.
    """

    theta: float
    rotary_dim: int
    factor: float = 1.0
    wide: bool = False


def read_rope(reader: ConfigReader, head_dim: int, partial: float = 1.0) -> RopeConfig:
    """Reads `rope_parameters` (or `rope_scaling`), else top-level `rope_theta`.

    `partial` is the family's default for `partial_rotary_factor`. Raises CheckpointError for any
    rope type but "default".
    """
    # transformers 5 writes the first, 4 wrote the second, and before that the fields stood alone.
    keys = ("rope_parameters", "rope_scaling")
    nested = (reader.section(key) for key in keys if reader.get(key, dict, None) is not None)
    settings = next(nested, reader)
    require_rope_type(settings, ["default", "mrope"])
    theta = settings.get("rope_theta", float, reader.get("rope_theta", float, 10000.0))
    partial = reader.get("partial_rotary_factor", float, partial)
    factor = settings.get("partial_rotary_factor", float, partial)
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"{settings.source}: partial_rotary_factor {factor} would rotate {rotary_dim} channels "
            f"of {head_dim}; it must be an even number of them"
        )
    return RopeConfig(theta, rotary_dim)


def require_rope_type(settings: ConfigReader, supported: list[str]) -> str:
    """The rope type in `settings` (by default "default"); CheckpointError unless `supported`."""
    kind: str = settings.get("rope_type", str, settings.get("type", str, "default"))
    if kind not in supported:
        raise CheckpointError(
            f"{settings.source}: rope_type {kind!r} is not supported; "
            f"supported: {', '.join(supported)}"
        )
    return kind
