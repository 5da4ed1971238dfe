"""Functions of one float32 number, for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to float32's own error and without overflow."""
    small = tl.exp(-tl.abs(x))
    sum_ = 1.0 + small
    # The sum drops digits of a small number; the factor puts back what the logarithm then lacks.
    rounded = tl.log(sum_) * (small / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0))
    return tl.maximum(x, 0.0) + tl.where(sum_ == 1.0, small, rounded)
