"""Matrix products by torch: oneDNN's packed ones where they pay, else the library's own.

Those of int8 are float32 products of whole numbers, which are exact.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# From this many rows on, oneDNN's packed product beats MKL's; below, its set-up does not pay.
PACKED_ROWS = 2
# The row count that oneDNN is told to pack for; 32 to 512 give equal speed.
PACK_HINT = 64
GROUP = 64
"""Inputs of an int8 matrix with one scale."""
NUMBERS = 1 << 20
"""Of an int8 product, at most, that are float32 at a time."""


class TorchLinear:
    """See `backend.Product`; weight [out, in], bias [out] or None.

    On CPU in float32 the matrix is kept twice: packed by oneDNN for batches (1.2 to 1.8 times MKL's
    speed on AMD, same precision) and, for single rows, with its longer side contiguous, which
    streams 2.5 times faster. In bfloat16 the packed one serves any number of rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        self.bias = bias
        self._packed: Tensor | None = None
        self._packed_rows = PACKED_ROWS if weight.dtype == torch.float32 else 0
        if _is_packable(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_HINT)
            # Looked up once: finding the overload anew costs a microsecond per product.
            self._product = torch.ops.mkldnn._linear_pointwise.default
            self._product_and_sum = torch.ops.mkldnn._linear_pointwise.binary
        if self._packed is not None and self._packed_rows == 0:
            return
        long_rows = outputs > inputs and self._packed is not None
        self._matrix = weight.t().contiguous() if long_rows else weight.t()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor
        if self._packed is not None and x.shape[0] >= self._packed_rows:
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


def _is_packable(weight: Tensor) -> bool:
    """True if oneDNN has a packed product for this matrix on this processor."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class TorchInt8Linear:
    """See `backend.Product`; weight [out, in], bias [out] or None; `naive.linear_int8` says how.

    The matrix takes one byte a number, and is made float32 anew in every call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        whole, scales = _rounded(weight)
        self._whole = whole.to(torch.int8).transpose(1, 2).contiguous()
        self._scales = scales.transpose(1, 2).contiguous()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        whole, scales = _rounded(x)
        rows, outputs = x.shape[0], self._scales.shape[2]
        y = torch.zeros((rows, outputs), device=x.device)
        count = max(1, NUMBERS // (outputs * (rows + GROUP)))
        for start in range(0, len(whole), count):
            part = slice(start, start + count)
            dots = whole[part] @ self._whole[part].float()
            y += dots.mul_(scales[part] * self._scales[part]).sum(0)
        if self._bias is not None:
            y += self._bias
        return (y if residual is None else y.add_(residual)).to(x.dtype)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers up to 127 as float32 [groups, rows, 64], and their scales [groups, rows, 1].

    A group's scale is its largest magnitude over 127; where that is no normal number, it is 0.
    """
    count, inputs = rows.shape
    padded = F.pad(rows.float(), (0, -inputs % GROUP))
    groups = padded.view(count, padded.shape[1] // GROUP, GROUP).transpose(0, 1)
    scales = groups.abs().amax(2, keepdim=True) / 127
    is_zero = scales < torch.finfo(torch.float32).tiny
    whole = (groups / scales).round_().masked_fill_(is_zero, 0.0)
    return whole, scales.masked_fill_(is_zero, 0.0)
