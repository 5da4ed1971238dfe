"""One tensor times another, or its sigmoid, as it is written."""

from torch import Tensor


def gate(x: Tensor, by: Tensor, residual: Tensor | None = None, *, sigmoid: bool = True) -> Tensor:
    """See `engine.ops.backend.Gate`: computed in float32, of the dtype of x."""
    y = x.float() * (by.float().sigmoid() if sigmoid else by.float())
    return (y if residual is None else y + residual.float()).to(x.dtype)
