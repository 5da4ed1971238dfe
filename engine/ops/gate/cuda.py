"""One tensor times another, or its sigmoid, on a CUDA device: in one pass."""

from torch import Tensor

from engine.ops.activation.cuda import FUNCTIONS, product


def gate(x: Tensor, by: Tensor, residual: Tensor | None = None, *, sigmoid: bool = True) -> Tensor:
    """See `backend.Gate`."""
    function = FUNCTIONS["sigmoid" if sigmoid else "identity"]
    return product(function, by, x, residual, dtype=x.dtype)
