"""The matrix product of a linear layer, as it is written."""

from torch import Tensor


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
