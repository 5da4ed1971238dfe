"""How a node computes with a model: choices of its operator that config.json does not know."""

from dataclasses import dataclass
from typing import Final, Literal

KernelChoice = Literal["auto", "torch"]
"""`auto`: the native kernels where they run, else torch's operators; `torch`: always these."""

Quantization = Literal["int8"]
"""Of the matrices of linear layers, when they are loaded; see `engine/ops/linear/naive.py`."""


@dataclass(slots=True, frozen=True)
class ComputeConfig:
    """The nodes of a cluster must choose alike: other kernels round sums in another order."""

    kernels: KernelChoice = "auto"
    quantization: Quantization | None = None


DEFAULTS: Final = ComputeConfig()
