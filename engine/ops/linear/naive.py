"""The matrix product of a linear layer, as it is written, in floats and in int8."""

import torch
from torch import Tensor

GROUP = 64
"""Inputs with one scale."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x [T, in], weight [out, in], bias [out], residual [T, out] -> [T, out], summed in float32.

    The result has the dtype of x.
    """
    y = x.float() @ weight.float().t()
    if bias is not None:
        y = y + bias.float()
    return (y if residual is None else y + residual.float()).to(x.dtype)


def linear_int8(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As `linear`, of int8: each row of x and of weight is rounded in groups of 64 inputs.

    With q the int8 and s the scales, y = sum over groups of s_w * s_x * (q_w . q_x), in float32.
    """
    y = torch.zeros(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[1], GROUP):
        of_x, scale_x = _rounded(x[:, start : start + GROUP])
        of_w, scale_w = _rounded(weight[:, start : start + GROUP])
        y += scale_x * scale_w.t() * (of_x.long() @ of_w.long().t()).float()
    if bias is not None:
        y = y + bias.float()
    return (y if residual is None else y + residual.float()).to(x.dtype)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, inputs], to the nearest, ties to even, and what they are times [rows, 1].

    A row's scale is its largest magnitude over 127; where that is no normal number, the row is 0.
    """
    rows = rows.float()
    scale = rows.abs().amax(1, keepdim=True) / 127
    zero = scale < torch.finfo(torch.float32).tiny
    whole = torch.where(zero, 0.0, rows / scale).round()
    return whole.to(torch.int8), torch.where(zero, 0.0, scale)
