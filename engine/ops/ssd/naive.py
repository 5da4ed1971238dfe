"""State space duality (Mamba-2) as a plain recurrence, token by token: the truth for `fast.py`.

Dao & Gu 2024, "Transformers are SSMs": h = exp(dt a) h + dt x b^T, y = h c. `ssd` adds how dt comes
about, and the skip d x.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.ops.ssd.parameters import SSDParameters


def ssd(
    x: Tensor,
    dt: Tensor | None,
    b: Tensor,
    c: Tensor,
    *,
    parameters: SSDParameters,
    query_lens: list[int],
    initial: Tensor,
    exports: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """The whole operator: as `ssd_chunk`, of dt [T, H] before softplus or None, with the skip."""
    steps = torch.ones(x.shape[:2])
    if dt is not None:
        bias = torch.zeros(x.shape[1]) if parameters.dt_bias is None else parameters.dt_bias
        steps = torch.log1p(torch.exp((dt.float() + bias).double())).float()
        steps = steps.clamp(*parameters.limits)
    y, final, exported = ssd_chunk(
        x, steps, parameters.a, b, c, query_lens=query_lens, initial=initial, exports=exports
    )
    if parameters.d is not None:
        y = y + x.float() * parameters.d[:, None]
    return y, final, exported


def ssd_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """One token of every sequence; `state` float32 [S, H, P, N] is updated IN PLACE.

    x [S, H, P], dt [S, H] (after softplus), a [H] (negative), b and c [S, G, N]; head h uses group
    h // (H / G). Returns y [S, H, P], float32.
    """
    heads_per_group = x.shape[1] // b.shape[1]
    b = b.float().repeat_interleave(heads_per_group, dim=1)
    c = c.float().repeat_interleave(heads_per_group, dim=1)
    decay = torch.exp(dt.float() * a)[:, :, None, None]
    push = (dt[:, :, None] * x.float())[:, :, :, None] * b[:, :, None, :]
    state.copy_(state * decay + push)
    return (state * c[:, :, None, :]).sum(-1)


def ssd_chunk(
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
    """Segments end to end: x [T, H, P], dt [T, H], a [H], b and c [T, G, N], T = sum(query_lens).

    `initial` float32 [S, H, P, N] is not changed. `exports`: (segment, tokens of it), ascending.
    Returns y [T, H, P], the final states and the states at the exports [E, H, P, N], all float32.
    """
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    final = initial.clone()
    exported = [initial[:0]]
    start = 0
    for segment, length in enumerate(query_lens):
        state = final[segment : segment + 1]
        for row in range(start, start + length):
            one = slice(row, row + 1)
            y[one] = ssd_step(x[one], dt[one], a, b[one], c[one], state)
            if (segment, row + 1 - start) in exports:
                exported.append(state.clone())
        start += length
    return y, final, torch.cat(exported)
