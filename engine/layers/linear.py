"""Matrix products with weights stored [out, in], several merged into one, multipliers folded in.

Folding costs nothing at run time; it rounds the weights once more where they are 16-bit. It is done
where the weights stay, in slices of `SLICE_BYTES`: a device has no room for a matrix twice.
"""

from typing import Final

import torch
from torch import Tensor

from engine.ops.backend import Product
from engine.weights.weights import Weights

SLICE_BYTES: Final = 16 << 20
"""A temporary has at most as many, or one row or column of a matrix if that has more."""


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
    scale_(matrix, columns * input_scale)
    biases = None
    if bias:
        biases = torch.empty(sum(rows), dtype=weights.dtype, device=weights.device)
        for (name, n), part in zip(sizes.items(), biases.split_with_sizes(rows), strict=True):
            weights.take(f"{name}.bias", (n,), out=part)
        scale_(biases, output_scale)
    if order is not None:
        order = order.to(weights.device)
        reorder_(matrix, order)
        biases = None if biases is None else biases[order]
    return weights.ops.linear(matrix, biases)


def scale_(stored: Tensor, scale: float | Tensor) -> None:
    """Multiplies rows [n, ...] IN PLACE, in float32; `scale` is a number or begins with n."""
    if isinstance(scale, float) and scale == 1.0:
        return
    numbers = stored.numel() // max(1, len(stored))
    count = max(1, SLICE_BYTES // (4 * max(1, numbers)))
    for start in range(0, len(stored), count):
        part = stored[start : start + count]
        by = scale[start : start + count] if isinstance(scale, Tensor) else scale
        if part.dtype == torch.float32:
            part.mul_(by)
        else:
            part.copy_(part.float().mul_(by))


def reorder_(matrix: Tensor, order: Tensor) -> None:
    """Puts the rows of matrix [n, m] IN PLACE into `order` int64 [n], of some columns at a time."""
    count = max(1, SLICE_BYTES // (matrix.element_size() * max(1, len(matrix))))
    for start in range(0, matrix.shape[1], count):
        part = matrix[:, start : start + count]
        part.copy_(part[order])


def per_output(runs: list[tuple[float, int]], device: torch.device) -> float | Tensor:
    """(scale, outputs) runs as one float32 number per output, or as one number where all agree."""
    scales = {scale for scale, _ in runs}
    if len(scales) == 1:
        return scales.pop()
    return torch.cat([torch.full((outputs,), scale, device=device) for scale, outputs in runs])
