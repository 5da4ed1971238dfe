"""The gated delta rule, token by token: the truth for `fast.py`.

Per value head, with a state S [dk, dv] and unit-length k (Yang et al., "Gated Delta Networks",
arXiv 2412.06464): S <- exp(g) S, then S <- S + k (beta (v - k^T S))^T, then o = S^T q / sqrt(dk).
g is one number, or one for each of the dk rows of S (Kimi Linear, arXiv 2510.26692).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters

NORM_EPS = 1e-6


def rates(a: Tensor, b: Tensor, parameters: DeltaRuleParameters) -> tuple[Tensor, Tensor]:
    """`g` and `beta` of the recurrence, float32: of a [T, Hv] or [T, Hv, dk] and b [T, Hv]."""
    steps = torch.log1p(torch.exp((a.float() + parameters.dt_bias).double())).float()
    rate = parameters.rate.view(-1, *[1] * (a.dim() - 2))
    return steps * rate, parameters.beta_scale / (1.0 + torch.exp(-b.float()))


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, beta: Tensor, state: Tensor) -> Tensor:
    """One token of every sequence: q, k [S, Hk, dk], v [S, Hv, dv], beta [S, Hv].

    `g` [S, Hv] or [S, Hv, dk] is the log of the decay (at most 0); q and k are not yet normalised.
    `state` [S, Hv, dk, dv] (float32, or float64 for a reference) is updated IN PLACE. Returns
    [S, Hv, dv] in the state's dtype.
    """
    repeats = v.shape[1] // k.shape[1]
    q, k = (_unit(x.to(state.dtype)).repeat_interleave(repeats, 1) for x in (q, k))
    g, beta, v = (x.to(state.dtype) for x in (g, beta, v))
    state *= g.exp().view(*g.shape[:2], -1, 1)
    seen = torch.einsum("shkv,shk->shv", state, k)
    state += torch.einsum("shk,shv->shkv", k, (v - seen) * beta.unsqueeze(-1))
    o: Tensor = torch.einsum("shkv,shk->shv", state, q)
    return o.mul_(q.shape[-1] ** -0.5)


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    beta: Tensor,
    query_lens: list[int],
    initial: Tensor,
    exports: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments end to end: as `step`, T = sum(query_lens) rows; `initial` is not changed.

    `exports`: (segment, tokens of it), ascending. Returns [T, Hv, dv], the final states and
    the states at the exports [E, Hv, dk, dv].
    """
    final = initial.clone()
    exported = [initial[:0]]
    outputs = []
    start = 0
    for segment, length in enumerate(query_lens):
        state = final[segment : segment + 1]
        for t in range(start, start + length):
            row = slice(t, t + 1)
            outputs.append(step(q[row], k[row], v[row], g[row], beta=beta[row], state=state))
            if (segment, t + 1 - start) in exports:
                exported.append(state.clone())
        start += length
    return torch.cat(outputs), final, torch.cat(exported)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
