"""Operators that move states, beside the naive ones in float64 or float32."""

from functools import partial

import torch

from benchmarks.gpu.operator_batches import NUM_UNITS, UNITS, Trial
from engine.ops.causal_conv1d import naive as conv
from engine.ops.gated_delta_rule import naive as gated
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.selective_scan import naive as scan
from engine.ops.ssd import naive as ssd
from engine.ops.ssd.parameters import SSDParameters


def limit_of(trial: Trial) -> float:
    """Torch's operators compute in float32 whatever the inputs are; kernels multiply those."""
    return trial.limit if trial.ops.name == "cuda" else 1e-4


def delta_rule(trial: Trial, *, by_channel: bool) -> None:
    """Heads of Qwen3.5, or with decays by channel of Kimi Linear."""
    keys, values, dim = 4, 8, 128
    if trial.small:
        # Below 16 segments are torch's: those of fla by channel take half a minute here.
        keys, values, dim = (1, 2, 8) if by_channel else (1, 1, 16)
    q, k = torch.randn(2, trial.tokens, keys, dim).to(trial.dtype)
    v = torch.randn(trial.tokens, values, dim).to(trial.dtype)
    of_heads = (values, dim) if by_channel else (values,)
    a, b = (torch.randn(trial.tokens, *shape).to(trial.dtype) for shape in (of_heads, (values,)))
    if by_channel:
        # A value head has a key head of its own.
        q, k = (part.repeat_interleave(values // keys, 1) for part in (q, k))
    rate, bias = -torch.rand(values), torch.randn(of_heads)
    pool = torch.randn(NUM_UNITS, values, dim, dim)
    theirs = trial.pool(pool)
    there = DeltaRuleParameters(rate=rate.to(trial.device), dt_bias=bias.to(trial.device))
    run = partial(trial.ops.gated_delta_rule, pool=theirs, index=trial.index(), parameters=there)
    found = run(*trial.rows(q, k, v, a, b))
    g, beta = gated.rates(a, b, DeltaRuleParameters(rate=rate, dt_bias=bias))
    y, final, exported = gated.chunk(
        q,
        k,
        v,
        g,
        beta=beta,
        query_lens=trial.query_lens,
        initial=pool[UNITS].double(),
        exports=trial.exports,
    )
    case = "gated delta rule" + (", decays by channel" if by_channel else "")
    after = trial.moved(pool, final, exported)
    trial.states(case, limit_of(trial), y=(found, y), pools=(theirs, after))


def selective_scan(trial: Trial) -> None:
    """Mamba-1, as in Jamba."""
    channels, size = (40, 4) if trial.small else (1024, 16)
    x = torch.randn(trial.tokens, channels).to(trial.dtype)
    b, c = torch.randn(2, trial.tokens, size).to(trial.dtype)
    dt, a = torch.rand(trial.tokens, channels), -4 * torch.rand(size, channels)
    pool = torch.randn(NUM_UNITS, size, channels)
    theirs = trial.pool(pool)
    x_there, dt_there, b_there, c_there = trial.rows(x, dt, b, c)
    run = partial(trial.ops.selective_scan, pool=theirs, index=trial.index())
    found = run(x_there, dt_there, a.to(trial.device), b_there, c_there)
    y, final, exported = scan.chunk(
        x,
        dt,
        a,
        b,
        c,
        query_lens=trial.query_lens,
        initial=pool[UNITS].double(),
        exports=trial.exports,
    )
    after = trial.moved(pool, final, exported)
    trial.states("selective scan", 1e-4, y=(found, y), pools=(theirs, after))


def duality(trial: Trial) -> None:
    """Mamba-2, as in Nemotron-H."""
    heads, dim, groups, size = (2, 16, 1, 16) if trial.small else (16, 64, 2, 128)
    x, dt = (
        torch.randn(trial.tokens, *shape).to(trial.dtype) for shape in ((heads, dim), (heads,))
    )
    b, c = torch.randn(2, trial.tokens, groups, size).to(trial.dtype)
    a, d, bias = -4 * torch.rand(heads), torch.rand(heads), torch.rand(heads)
    pool = torch.randn(NUM_UNITS, heads, dim, size)
    theirs = trial.pool(pool)
    there = SSDParameters(a=a.to(trial.device), d=d.to(trial.device), dt_bias=bias.to(trial.device))
    run = partial(trial.ops.ssd, pool=theirs, index=trial.index(), parameters=there)
    found = run(*trial.rows(x, dt, b, c))
    here = SSDParameters(a=a, d=d, dt_bias=bias)
    y, final, exported = ssd.ssd(
        x,
        dt,
        b,
        c,
        parameters=here,
        query_lens=trial.query_lens,
        initial=pool[UNITS],
        exports=trial.exports,
    )
    after = trial.moved(pool, final, exported)
    trial.states("ssd", limit_of(trial), y=(found, y), pools=(theirs, after))


def convolution(trial: Trial) -> None:
    """Four taps, with a bias and SiLU."""
    taps, channels = 4, 40 if trial.small else 512
    x, weight = (torch.randn(n, channels).to(trial.dtype) for n in (trial.tokens, taps))
    bias = torch.randn(channels).to(trial.dtype)
    pool = torch.randn(NUM_UNITS, taps - 1, channels).to(trial.dtype)
    theirs = trial.pool(pool)
    (x_there,) = trial.rows(x)
    found = trial.ops.causal_conv1d(
        x_there, theirs, trial.index(), weight.to(trial.device), bias.to(trial.device)
    )
    y, final, exported = conv.conv_chunk(
        x.float(),
        trial.query_lens,
        pool[UNITS].float(),
        weight.float(),
        bias.float(),
        exports=trial.exports,
    )
    after = trial.moved(pool, final, exported)
    trial.states("causal conv1d", trial.limit, y=(found, y), pools=(theirs, after))
