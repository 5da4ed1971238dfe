"""The selective scan (Mamba-1) token by token: the truth for `fast.py`.

Gu & Dao, arXiv 2312.00752. Every channel d has its own state h [N], each number of which decays at
its own rate: h = exp(dt_d a_d) h + dt_d x_d b, y_d = h . c; b and c are shared by all channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """One token of every sequence; `state` [S, N, D] is updated IN PLACE.

    x and dt [S, D] (dt after softplus), a [N, D] (negative), b and c [S, N]. Computed in the
    state's dtype: float32, or float64 for a reference. Returns y [S, D] in it.
    """
    x, dt, a, b, c = (operand.to(state.dtype) for operand in (x, dt, a, b, c))
    decay = torch.exp(torch.einsum("sd,nd->snd", dt, a))
    state.copy_(state * decay + torch.einsum("sd,sn->snd", dt * x, b))
    y: Tensor = torch.einsum("snd,sn->sd", state, c)
    return y


def chunk(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    query_lens: list[int],
    initial: Tensor,
    exports: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments end to end: as `step`, T = sum(query_lens) rows; `initial` is not changed.

    `exports`: (segment, tokens of it), ascending. Returns y [T, D], the final states and the states
    at the exports [E, N, D].
    """
    final = initial.clone()
    exported = [initial[:0]]
    outputs = []
    start = 0
    for segment, length in enumerate(query_lens):
        state = final[segment : segment + 1]
        for t in range(start, start + length):
            row = slice(t, t + 1)
            outputs.append(step(x[row], dt[row], a, b[row], c[row], state))
            if (segment, t + 1 - start) in exports:
                exported.append(state.clone())
        start += length
    return torch.cat(outputs), final, torch.cat(exported)
