"""Depthwise causal convolution, perhaps with SiLU, one token at a time: the truth for `fast.py`.

Knows nothing of layers or caches; a state is the last K-1 inputs, oldest first.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = True
) -> Tensor:
    """One token of every sequence: x [S, D], state [S, K-1, D] (updated IN PLACE), weight [K, D].

    Returns the convolution [S, D], through SiLU with `silu`, in the dtype of x; sums are float32.
    """
    window = torch.cat([state, x.unsqueeze(1)], dim=1)
    y = torch.einsum("skd,kd->sd", window.float(), weight.float())
    state.copy_(window[:, 1:])
    y = y if bias is None else y + bias.float()
    return (F.silu(y) if silu else y).to(x.dtype)


def conv_chunk(
    x: Tensor,
    query_lens: list[int],
    initial: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    exports: Sequence[tuple[int, int]] = (),
    silu: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments end to end: x [T, D], T = sum(query_lens), initial [S, K-1, D], weight [K, D].

    `exports`: (segment, tokens of it), ascending. Returns the convolution [T, D], through SiLU with
    `silu`, the final states [S, K-1, D] and the states at the exports [E, K-1, D]; `initial` is not
    changed.
    """
    final = initial.clone()
    exported = [initial[:0]]
    rows = []
    start = 0
    for segment, length in enumerate(query_lens):
        state = final[segment : segment + 1]
        for t in range(start, start + length):
            rows.append(conv_step(x[t : t + 1], state, weight, bias, silu=silu))
            if (segment, t + 1 - start) in exports:
                exported.append(state.clone())
        start += length
    return torch.cat(rows), final, torch.cat(exported)
