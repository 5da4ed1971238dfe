"""From stored projections to one product, with a model's scalar multipliers folded into it.

Folding costs nothing at run time; it rounds the weights once more where they are 16-bit.
"""

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.weights import Weights

Scale = float | Tensor


def load_linear(
    weights: Weights,
    prefix: str,
    sizes: dict[str, int],
    *,
    inputs: int,
    bias: bool = False,
    input_scale: float = 1.0,
    output_scale: Scale = 1.0,
) -> Linear:
    """y = output_scale * (W (input_scale * x) + b), for stored matrices side by side.

    `sizes`: outputs by name; tensors are `<prefix>.<name>.{weight,bias}`. `output_scale` is one
    number or one per output.
    """
    names = {f"{prefix}.{name}": size for name, size in sizes.items()}
    matrix = torch.cat([weights.take(f"{name}.weight", (n, inputs)) for name, n in names.items()])
    columns = output_scale.unsqueeze(1) if isinstance(output_scale, Tensor) else output_scale
    matrix = scaled(matrix, columns * input_scale)
    if not bias:
        return Linear(matrix)
    biases = torch.cat([weights.take(f"{name}.bias", (n,)) for name, n in names.items()])
    return Linear(matrix, scaled(biases, output_scale))


def scaled(stored: Tensor, scale: Scale) -> Tensor:
    """stored * scale, multiplied in float32, in the dtype of `stored`."""
    if isinstance(scale, float) and scale == 1.0:
        return stored
    return (stored.float() * scale).to(stored.dtype)


def per_output(runs: list[tuple[float, int]], device: torch.device) -> Tensor:
    """(scale, outputs) runs as one float32 number per output."""
    return torch.cat([torch.full((outputs,), scale, device=device) for scale, outputs in runs])
