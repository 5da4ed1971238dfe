"""How a node computes with a model: choices of its operator that config.json does not know."""

from dataclasses import dataclass
from typing import Final, Literal

KernelChoice = Literal["auto", "torch"]
"""`auto`: the native kernels where they run, else torch's operators; `torch`: always these."""


@dataclass(slots=True, frozen=True)
class ComputeConfig:
    """The nodes of a cluster must choose alike: other kernels round sums in another order."""

    kernels: KernelChoice = "auto"


DEFAULTS: Final = ComputeConfig()
