"""How a node computes with a model: options that config.json has no words for."""

from dataclasses import dataclass
from typing import Final, Literal

KernelChoice = Literal["auto", "torch"]
"""`auto`: the native kernels where they run, else torch's operators; `torch`: these everywhere."""

Quantization = Literal["int8"]
"""Of linear layers' matrices, when they are loaded; `engine/ops/linear/naive.py` has its rule."""


@dataclass(slots=True, frozen=True)
class ComputeConfig:
    """The nodes of a cluster must choose alike: other kernels round sums in another order."""

    kernels: KernelChoice = "auto"
    quantization: Quantization | None = None


DEFAULTS: Final = ComputeConfig()
