"""A mixture of experts in one call: each expert that is chosen reads its packed matrices once."""

import torch
from torch import Tensor

from engine.model_configs.feed_forward import Activation
from engine.native.kernels import Kernels, pointer
from engine.ops.activation.native import FUNCTIONS
from engine.ops.linear.native import LANES, WIDTH, WORD


class NativeExperts:
    """See `backend.Mixture`; all of the kernels' dtype, and rows of matrices are whole words.

    Rounded to that dtype are what goes into `down`, and the result. A row's result depends on the
    row alone.
    """

    def __init__(
        self, kernels: Kernels, up: Tensor, down: Tensor, *, activation: Activation, gated: bool
    ) -> None:
        count, outer, inner = down.shape
        self._up = _packed(kernels, up, sides=2 if gated else 1)
        self._down = _packed(kernels, down, sides=1)
        sizes = (count, outer, inner, int(gated), FUNCTIONS[activation])
        self._fixed = (pointer(self._up), pointer(self._down), *sizes)
        self._run = kernels.experts
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(
        self, x: Tensor, chosen: Tensor, shares: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.contiguous()
        added = None if residual is None else residual.contiguous()
        rows, top_k = chosen.shape
        y = self._empty(x.shape, x.dtype)
        self._run(
            *self._fixed,
            x.data_ptr(),
            rows,
            chosen.data_ptr(),
            shares.data_ptr(),
            top_k,
            pointer(added),
            y.data_ptr(),
            self._threads,
        )
        return y


def _packed(kernels: Kernels, matrices: Tensor, *, sides: int) -> Tensor:
    """Panels of [E, out, in]; of two sides, each panel of the first is beside that of the second.

    gate rows | 0 .. 15 | 16 .. 31 |     up rows | 0 .. 15 | 16 .. 31 |
    panels    | gate 0 .. 15 | up 0 .. 15 | gate 16 .. 31 | up 16 .. 31 |
    """
    count, outputs, inputs = matrices.shape
    step = WIDTH // sides
    side = outputs // sides
    padded = -(-side // step) * step
    panels = kernels.huge_pages.take((count, sides * padded, inputs), matrices.dtype)
    rows = torch.zeros((sides, padded, inputs), dtype=matrices.dtype)
    words = inputs * matrices.dtype.itemsize // WORD
    for matrix, own in zip(matrices, panels, strict=True):
        rows[:, :side] = matrix.view(sides, side, inputs)
        ordered = rows.view(sides, -1, LANES, inputs).transpose(0, 1).contiguous()
        kernels.pack(pointer(ordered), sides * padded, words, pointer(own))
    return panels
