"""Floors of a step: how fast it could be if it only moved its bytes, or only multiplied.

Both are in tokens per second, at speeds of the machine that are measured when they are asked for.
"""

import torch

from benchmarks.support import machine
from benchmarks.support.work import Work


def stream_floor(work: Work, weight_bytes: int, state_bytes: int = 0) -> float:
    """All weights read once a step, and the states of each sequence, in bytes, read and written.

    Keys and values are left out: 64 tokens have few.
    """
    moved = weight_bytes + 2 * state_bytes * work.batch
    return machine.read_bandwidth(weight_bytes) / moved * work.step_tokens


def gemm_floor(parameters: int, dtype: torch.dtype) -> float:
    """A product and a sum per parameter and token. `parameters`: those that a token uses."""
    return machine.gemm_rate(dtype) / (2 * parameters)
