"""Matrix products with weights stored [out, in], several merged into one, multipliers folded in.

Folding costs nothing at run time; it rounds the weights once more where they are 16-bit.
"""

import torch
from torch import Tensor

from engine.weights.weights import Weights

# From this many rows on, oneDNN's packed product beats MKL's; below, its set-up does not pay.
PACKED_ROWS = 2
# The row count that oneDNN is told to pack for; 32 to 512 give equal speed.
PACK_HINT = 64


class Linear:
    """y = x W^T + b, with W [out, in] and b [out] or None.

    On CPU in float32 the matrix is kept twice: packed by oneDNN for batches (1.2 to 1.8 times MKL's
    speed on AMD, same precision) and, for single rows, with its longer side contiguous, which
    streams 2.5 times faster.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        self.bias = bias
        self._packed: Tensor | None = None
        is_suited = weight.device.type == "cpu" and weight.dtype == torch.float32
        if is_suited and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_HINT)
            # Looked up once: finding the overload anew costs a microsecond per product.
            self._product = torch.ops.mkldnn._linear_pointwise.default
            self._product_and_sum = torch.ops.mkldnn._linear_pointwise.binary
        long_rows = outputs > inputs and self._packed is not None
        self._matrix = weight.t().contiguous() if long_rows else weight.t()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> x W^T + b [T, out], added to `residual` [T, out] in the same call."""
        y: Tensor
        if self._packed is not None and x.shape[0] >= PACKED_ROWS:
            if residual is None:
                y = self._product(x, self._packed, self.bias, "none", [], "")
            else:
                y = self._product_and_sum(x, residual, self._packed, self.bias, "add")
            return y
        if residual is not None:
            y = torch.addmm(residual, x, self._matrix)
            return y if self.bias is None else y.add_(self.bias)
        if self.bias is not None:
            return torch.addmm(self.bias, x, self._matrix)
        return torch.mm(x, self._matrix)


def load_linear(
    weights: Weights,
    sizes: dict[str, int],
    *,
    inputs: int,
    bias: bool = False,
    input_scale: float = 1.0,
    output_scale: float | Tensor = 1.0,
    order: Tensor | None = None,
) -> Linear:
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
    return Linear(matrix, biases)


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
