"""Row-wise kernels give the same bits on any number of threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.model_configs.feed_forward import Activation
from engine.model_configs.recurrent import Gating
from engine.native.kernels import Kernels
from engine.ops.activation.native import NativeActivation
from engine.ops.gate.native import NativeGate
from engine.ops.gated_norm.native import NativeGatedNorm
from engine.ops.norm.native import NativeNorm
from engine.ops.rotary.native import NativeRotate
from tests.ops.native import native_kernels

DRAW = torch.Generator().manual_seed(0)
ROWS, SIZE = 601, 250  # enough for a second thread
X = torch.randn(ROWS, SIZE, generator=DRAW)
TABLE = torch.randn(2, ROWS, 1, SIZE, generator=DRAW)
WEIGHT = torch.randn(SIZE, generator=DRAW)


def norm(kernels: Kernels) -> Tensor:
    return NativeNorm(kernels, WEIGHT, 1e-6, torch.float32)(X)


def gated_norm(kernels: Kernels) -> Tensor:
    return NativeGatedNorm(kernels, WEIGHT, 1e-6, gating=Gating.GATE_THEN_NORM)(X, X)


def activation(kernels: Kernels) -> Tensor:
    return NativeActivation(kernels, Activation.SILU, gated=False)(X)


def gate(kernels: Kernels) -> Tensor:
    return NativeGate(kernels)(X, X, X)


def rotate(kernels: Kernels) -> Tensor:
    x = X.clone()
    NativeRotate(kernels)(x.unsqueeze(1), TABLE)
    return x


@pytest.mark.parametrize("run", [norm, gated_norm, activation, gate, rotate])
def test_threads_change_nothing(run: Callable[[Kernels], Tensor]) -> None:
    kernels = native_kernels()
    alone = run(kernels)
    kernels.threads = 3
    assert torch.equal(run(kernels), alone)
