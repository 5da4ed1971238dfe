"""One tensor times another, or its sigmoid, by torch."""

from torch import Tensor


def gate(x: Tensor, by: Tensor, residual: Tensor | None = None, *, sigmoid: bool = True) -> Tensor:
    """See `engine.ops.backend.Gate`."""
    y = x * (by.sigmoid() if sigmoid else by)
    return y if residual is None else y.add_(residual)
