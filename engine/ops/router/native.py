"""A router in one pass over each row, from its packed matrix."""

import torch
from torch import Tensor

from engine.model_configs.feed_forward import RouterConfig, Scoring
from engine.native.kernels import Kernels, pointer
from engine.ops.linear.native import padded


class NativeRouter:
    """See `backend.Router`; x has the kernels' dtype, scores are float32."""

    def __init__(
        self, kernels: Kernels, config: RouterConfig, matrix: Tensor, correction: Tensor | None
    ) -> None:
        count, inputs = matrix.shape
        self._panels = torch.empty((padded(count), inputs))
        matrix = matrix.contiguous()
        kernels.pack(pointer(matrix), count, inputs, pointer(self._panels))
        self._correction = correction
        self._top_k = config.top_k
        self._fixed = (
            *(pointer(self._panels), pointer(correction), count, inputs),
            *(config.top_k, config.groups, config.top_groups),
            *(config.scoring is Scoring.SOFTMAX, config.renormalise),
            *(config.floor, config.scale),
        )
        self._run = kernels.route
        self._empty = kernels.empty

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        shape = (x.shape[0], self._top_k)
        chosen = self._empty(shape, torch.int64)
        shares = self._empty(shape, torch.float32)
        self._run(*self._fixed, x.data_ptr(), shape[0], chosen.data_ptr(), shares.data_ptr())
        return chosen, shares
