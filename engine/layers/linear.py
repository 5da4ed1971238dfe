"""Matrix products with weights stored [out, in], several merged into one, multipliers folded in.

Folding costs nothing at run time; it rounds the weights once more where they are 16-bit.
"""

import torch
from torch import Tensor

from engine.ops.backend import Product
from engine.weights.weights import Weights


def load_linear(
    weights: Weights,
    sizes: dict[str, int],
    *,
    inputs: int,
    bias: bool = False,
    input_scale: float = 1.0,
    output_scale: float | Tensor = 1.0,
    order: Tensor | None = None,
) -> Product:
    """y = output_scale * (W (input_scale * x) + b), for stored matrices side by side.

    `sizes`: outputs by name; tensors are `<name>.{weight,bias}`. `output_scale` is one number or
    one per output. `order` int64 [out] then puts the outputs in another order.
    """
    # Scales are folded into the weights once, so that no forward pass multiplies by them.
    rows = list(sizes.values())
    matrix = torch.empty((sum(rows), inputs), dtype=weights.dtype, device=weights.device)
    for (name, n), part in zip(sizes.items(), matrix.split_with_sizes(rows), strict=True):
        weights.take(f"{name}.weight", (n, inputs), out=part)
    columns = output_scale.unsqueeze(1) if isinstance(output_scale, Tensor) else output_scale
    matrix = scaled(matrix, columns * input_scale)
    biases = None
    if bias:
        parts = [weights.take(f"{name}.bias", (n,)) for name, n in sizes.items()]
        biases = scaled(torch.cat(parts), output_scale)
    if order is not None:
        order = order.to(weights.device)
        matrix, biases = matrix[order], None if biases is None else biases[order]
    return weights.ops.linear(matrix, biases)


def scaled(stored: Tensor, scale: float | Tensor) -> Tensor:
    """stored * scale, multiplied in float32, in the dtype of `stored`."""
    if isinstance(scale, float) and scale == 1.0:
        return stored
    return (stored.float() * scale).to(stored.dtype)


def per_output(runs: list[tuple[float, int]], device: torch.device) -> float | Tensor:
    """(scale, outputs) runs as one float32 number per output, or as one number where all agree."""
    scales = {scale for scale, _ in runs}
    if len(scales) == 1:
        return scales.pop()
    return torch.cat([torch.full((outputs,), scale, device=device) for scale, outputs in runs])
