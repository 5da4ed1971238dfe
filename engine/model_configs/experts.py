"""Sizes of a sparse mixture of experts, whatever family it is in. Torch-free."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ExpertsConfig:
    """`top_k` of `count` gated MLPs of `intermediate_size` channels, for each token."""

    count: int
    top_k: int
    intermediate_size: int
