"""Matrix products with weights stored [out, in], and merging of several into one.

Knows nothing of names in a checkpoint; callers take the tensors.
"""

import torch
from torch import Tensor

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
        self._packed = _pack(weight)
        long_rows = outputs > inputs and self._packed is not None
        self._matrix = weight.t().contiguous() if long_rows else weight.t()

    @classmethod
    def merged(cls, weights: list[Tensor], biases: list[Tensor] | None = None) -> "Linear":
        """One product instead of several over the same input; outputs lie side by side in order."""
        return cls(torch.cat(weights), None if biases is None else torch.cat(biases))

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self._packed is not None and x.shape[0] >= PACKED_ROWS:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._packed, self.bias, "none", [], ""
            )
            return y
        if self.bias is None:
            return torch.mm(x, self._matrix)
        return torch.addmm(self.bias, x, self._matrix)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b in one call, x [T, in], residual [T, out]."""
        if self._packed is not None and x.shape[0] >= PACKED_ROWS:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self._packed, self.bias, "add"
            )
            return y
        y = torch.addmm(residual, x, self._matrix)
        return y if self.bias is None else y.add_(self.bias)


def _pack(weight: Tensor) -> Tensor | None:
    """`weight` in oneDNN's blocked layout, or None where torch's own product is better."""
    suited = weight.device.type == "cpu" and weight.dtype == torch.float32
    if not suited or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_HINT)
    return packed
