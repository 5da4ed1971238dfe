"""The phase `operators`: the device's table of operators beside the naive ones on the CPU.

Inputs are random, and in bfloat16 both sides get the same rounded ones. An error is a share of the
largest value.
"""

from collections.abc import Mapping
from functools import partial

import msgspec
import torch
from torch import Tensor

from benchmarks.gpu.sheet import Setting, Sheet
from engine.forward import (
    AttentionCache,
    AttentionIndex,
    ForwardBatch,
    SequenceLens,
    StateExport,
    StateIndex,
)
from engine.layers.rotary import Rotary
from engine.model_configs.feed_forward import Activation
from engine.model_configs.rope import RopeConfig
from engine.ops.backend import Ops, ops_for, torch_ops
from engine.ops.causal_conv1d import naive as conv
from engine.ops.experts import naive as experts
from engine.ops.gated_delta_rule import naive as gated
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.paged_attention import naive as attention
from engine.ops.selective_scan import naive as scan
from engine.ops.ssd import naive as ssd
from engine.ops.ssd.parameters import SSDParameters
from engine.step import SamplingInput
from engine.types import SamplingParams
from engine.worker.sampler import sample

LIMITS: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DECODES = 3
LENS = [1, 1, 1, 65, 130, 64]
CONTEXT = [40, 7, 200, 0, 30, 100]
EXPORT = StateExport(segment=1, offset=100, unit=9)
UNITS = [5, 2, 7, 1, 8, 3]  # of the sequences; unit 9 takes the export
NUM_UNITS = 10
BLOCK = 16


def run(sheet: Sheet, setting: Setting) -> None:
    """Each family in float32 and in bfloat16."""
    torch.manual_seed(0)
    device = torch.device(setting.device)
    for dtype in (torch.float32, torch.bfloat16):
        ops = ops_for(device, dtype, kernels="auto")
        name = str(dtype).removeprefix("torch.")
        for window in (None, 40):
            with sheet.attempt(f"paged attention, {name}"):
                _attention(sheet, ops, device, dtype=dtype, window=window)
        for by_channel in (False, True):
            with sheet.attempt(f"gated delta rule, {name}"):
                _gated(sheet, ops, device, dtype=dtype, by_channel=by_channel)
        with sheet.attempt(f"selective scan, {name}"):
            _scan(sheet, ops, device, dtype=dtype)
        with sheet.attempt(f"ssd, {name}"):
            _ssd(sheet, ops, device, dtype=dtype)
        with sheet.attempt(f"causal conv1d, {name}"):
            _conv(sheet, ops, device, dtype=dtype)
        with sheet.attempt(f"experts, {name}"):
            _experts(sheet, ops, device, dtype=dtype)
        with sheet.attempt(f"norm and rotary, {name}"):
            _small(sheet, ops, device, dtype=dtype)
    with sheet.attempt("sampling"):
        _sampling(sheet, device)


def _index(device: torch.device) -> StateIndex:
    lens = SequenceLens(DECODES, LENS, CONTEXT)
    return StateIndex(torch.tensor(UNITS, device=device), None, lens, (EXPORT,))


def _attention(
    sheet: Sheet, ops: Ops, device: torch.device, *, dtype: torch.dtype, window: int | None
) -> None:
    heads, kv_heads, dim, tokens = 16, 4, 128, sum(LENS)
    ends = [context + length for context, length in zip(CONTEXT, LENS, strict=True)]
    counts = [-(-end // BLOCK) for end in ends]
    rows = torch.randperm(sum(counts) + 3)
    pages = torch.randn(2, len(rows), kv_heads, BLOCK, dim).to(dtype)
    tables = torch.zeros(len(LENS), max(counts), dtype=torch.int64)
    slots, first = [], 0
    for number, (count, context, end) in enumerate(zip(counts, CONTEXT, ends, strict=True)):
        tables[number, :count] = rows[first : first + count]
        first += count
        for at in range(context, end):
            row = int(tables[number, at // BLOCK])
            slots += [(row * kv_heads + head) * BLOCK + at % BLOCK for head in range(kv_heads)]
    q = torch.randn(tokens, heads, dim).to(dtype)
    k, v = torch.randn(2, tokens, kv_heads, dim).to(dtype)
    lens = SequenceLens(DECODES, LENS, CONTEXT)

    def cache(of: Tensor) -> AttentionCache:
        return AttentionCache(of[0], of[1], of[0].view(-1, dim), of[1].view(-1, dim))

    there = cache(pages.to(device, copy=True))
    positions = torch.cat([torch.arange(*span) for span in zip(CONTEXT, ends, strict=True)])
    index = AttentionIndex(
        tables.to(device), torch.tensor(slots, device=device), positions.to(device), lens
    )
    found = ops.paged_attention(
        q.to(device), k.to(device), v.to(device), there, index, scale=dim**-0.5, window=window
    )
    here = cache(pages)
    attention.write_tokens(k, v, here, torch.tensor(slots))
    truth, at = [], 0
    for number, length in enumerate(LENS):
        # The naive one has the dtype of the queries; the truth shall not be rounded.
        part = q[at : at + length].float()
        context = CONTEXT[number]
        truth.append(
            attention.prefill(
                part, here, tables[number], context=context, scale=dim**-0.5, window=window
            )
        )
        at += length
    expected = torch.cat(truth).reshape(tokens, -1)
    name = str(dtype).removeprefix("torch.")
    case = f"paged attention, {name}, window {window}"
    sheet.near(f"{case}, decodes", found[:DECODES], expected[:DECODES], limit=LIMITS[dtype])
    sheet.near(f"{case}, prefills", found[DECODES:], expected[DECODES:], limit=LIMITS[dtype])


def _states(
    sheet: Sheet, case: str, limit: float, *, y: tuple[Tensor, Tensor], pools: tuple[Tensor, Tensor]
) -> None:
    """The outputs of steps and chunks, and all states: those of nobody must not have changed."""
    sheet.near(f"{case}, steps", y[0][:DECODES], y[1][:DECODES], limit=limit)
    sheet.near(f"{case}, chunks", y[0][DECODES:], y[1][DECODES:], limit=limit)
    sheet.near(f"{case}, states", pools[0], pools[1], limit=limit)


def _move(pool: Tensor, final: Tensor, exported: Tensor) -> Tensor:
    """`pool` as it should be after the batch."""
    after = pool.clone()
    after[UNITS] = final.to(pool.dtype)
    after[EXPORT.unit] = exported[0].to(pool.dtype)
    return after


EXPORTS = [(DECODES + EXPORT.segment, EXPORT.offset)]


def _gated(
    sheet: Sheet, ops: Ops, device: torch.device, *, dtype: torch.dtype, by_channel: bool
) -> None:
    keys, values, dim, tokens = 4, 8, 128, sum(LENS)
    q, k = torch.randn(2, tokens, keys, dim).to(dtype)
    v = torch.randn(tokens, values, dim).to(dtype)
    of_heads = (values, dim) if by_channel else (values,)
    a, b = torch.randn(tokens, *of_heads).to(dtype), torch.randn(tokens, values).to(dtype)
    rate, bias = -torch.rand(values), torch.randn(of_heads)
    pool = torch.randn(NUM_UNITS, values, dim, dim)
    theirs = pool.to(device, copy=True)
    rows = (part.to(device) for part in (q, k, v, a, b))
    there = DeltaRuleParameters(rate=rate.to(device), dt_bias=bias.to(device))
    found = partial(ops.gated_delta_rule, pool=theirs, index=_index(device), parameters=there)(
        *rows
    )
    g, beta = gated.rates(a, b, DeltaRuleParameters(rate=rate, dt_bias=bias))
    y, final, exported = gated.chunk(
        q, k, v, g, beta=beta, query_lens=LENS, initial=pool[UNITS].double(), exports=EXPORTS
    )
    after = _move(pool, final, exported)
    case = f"gated delta rule, {str(dtype).removeprefix('torch.')}"
    case += ", decays by channel" if by_channel else ""
    _states(sheet, case, LIMITS[torch.float32], y=(found, y), pools=(theirs, after))


def _scan(sheet: Sheet, ops: Ops, device: torch.device, *, dtype: torch.dtype) -> None:
    channels, size, tokens = 1024, 16, sum(LENS)
    x = torch.randn(tokens, channels).to(dtype)
    b, c = torch.randn(2, tokens, size).to(dtype)
    dt, a = torch.rand(tokens, channels), -4 * torch.rand(size, channels)
    pool = torch.randn(NUM_UNITS, size, channels)
    theirs = pool.to(device, copy=True)
    rows = (part.to(device) for part in (x, dt, a, b, c))
    found = partial(ops.selective_scan, pool=theirs, index=_index(device))(*rows)
    y, final, exported = scan.chunk(
        x, dt, a, b, c, query_lens=LENS, initial=pool[UNITS].double(), exports=EXPORTS
    )
    after = _move(pool, final, exported)
    case = f"selective scan, {str(dtype).removeprefix('torch.')}"
    _states(sheet, case, LIMITS[torch.float32], y=(found, y), pools=(theirs, after))


def _ssd(sheet: Sheet, ops: Ops, device: torch.device, *, dtype: torch.dtype) -> None:
    heads, dim, groups, size, tokens = 16, 64, 2, 128, sum(LENS)
    x, dt = torch.randn(tokens, heads, dim).to(dtype), torch.randn(tokens, heads).to(dtype)
    b, c = torch.randn(2, tokens, groups, size).to(dtype)
    a, d, bias = -4 * torch.rand(heads), torch.rand(heads), torch.rand(heads)
    pool = torch.randn(NUM_UNITS, heads, dim, size)
    theirs = pool.to(device, copy=True)
    rows = (part.to(device) for part in (x, dt, b, c))
    there = SSDParameters(a=a.to(device), d=d.to(device), dt_bias=bias.to(device))
    found = partial(ops.ssd, pool=theirs, index=_index(device), parameters=there)(*rows)
    here = SSDParameters(a=a, d=d, dt_bias=bias)
    y, final, exported = ssd.ssd(
        x, dt, b, c, parameters=here, query_lens=LENS, initial=pool[UNITS], exports=EXPORTS
    )
    after = _move(pool, final, exported)
    case = f"ssd, {str(dtype).removeprefix('torch.')}"
    _states(sheet, case, LIMITS[torch.float32], y=(found, y), pools=(theirs, after))


def _conv(sheet: Sheet, ops: Ops, device: torch.device, *, dtype: torch.dtype) -> None:
    taps, channels, tokens = 4, 512, sum(LENS)
    x, weight = torch.randn(tokens, channels).to(dtype), torch.randn(taps, channels).to(dtype)
    bias = torch.randn(channels).to(dtype)
    pool = torch.randn(NUM_UNITS, taps - 1, channels).to(dtype)
    theirs = pool.to(device, copy=True)
    found = ops.causal_conv1d(
        x.to(device), theirs, _index(device), weight.to(device), bias.to(device)
    )
    y, final, exported = conv.conv_chunk(
        x.float(), LENS, pool[UNITS].float(), weight.float(), bias.float(), exports=EXPORTS
    )
    after = _move(pool, final, exported)
    case = f"causal conv1d, {str(dtype).removeprefix('torch.')}"
    _states(sheet, case, LIMITS[dtype], y=(found, y), pools=(theirs, after))


def _experts(sheet: Sheet, ops: Ops, device: torch.device, *, dtype: torch.dtype) -> None:
    count, top_k, width, inner, tokens = 32, 4, 256, 128, sum(LENS)
    x = torch.randn(tokens, width).to(dtype)
    # Of half of them, so that there are experts without a token.
    chosen = torch.rand(tokens, count // 2).argsort(dim=1)[:, :top_k].contiguous()
    shares = torch.rand(tokens, top_k)
    up = (torch.randn(count, 2 * inner, width) * width**-0.5).to(dtype)
    down = (torch.randn(count, width, inner) * inner**-0.5).to(dtype)
    kind, rows = Activation.SILU, (part.to(device) for part in (x, chosen, shares))
    run = ops.experts(up.to(device), down.to(device), activation=kind, gated=True)
    found = run(*rows)
    truth = experts.experts(x, chosen, shares, up, down, activation=kind, gated=True)
    name = str(dtype).removeprefix("torch.")
    sheet.near(f"experts, {name}", found, truth, limit=LIMITS[dtype])


def _small(sheet: Sheet, ops: Ops, device: torch.device, *, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    x, weight = torch.randn(64, 2560).to(dtype), torch.rand(2560)
    found = ops.norm(weight.to(device), 1e-6, dtype)(x.to(device))
    truth = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    sheet.near(f"norm, {name}", found, truth, limit=LIMITS[dtype])
    matrix = torch.randn(1024, 2560).to(dtype)
    found = x.to(device) @ matrix.to(device).t()
    sheet.near(f"product, {name}", found, x.double() @ matrix.double().t(), limit=LIMITS[dtype])
    rope = RopeConfig(theta=1e6, rotary_dim=64)
    lens = SequenceLens(2, [1, 1], [5000, 17])
    turned = []
    here = torch.device("cpu"), torch.float32, torch_ops()
    for place, kind, own in ((device, dtype, ops), here):
        positions = torch.tensor([5000, 17], device=place)
        batch = ForwardBatch(positions, positions, lens, (), positions)
        heads = x[:2, :1024].view(2, 4, 256).to(place, kind, copy=True)
        own.rotate_(heads, Rotary(rope, kind, place, ops=own).select(batch))
        turned.append(heads)
    sheet.near(f"rotary, {name}, position 5,000", turned[0], turned[1], limit=5 * LIMITS[dtype])


def _sampling(sheet: Sheet, device: torch.device) -> None:
    """The same logits, so the same tokens."""
    logits = 4 * torch.randn(64, 32_000)
    kinds = {
        "greedy": SamplingInput(SamplingParams(temperature=0.0, logprobs=3), 0),
        "top-p": SamplingInput(SamplingParams(temperature=0.9, top_p=0.9, seed=3), 0),
        "top-k and min-p": SamplingInput(
            SamplingParams(temperature=1.2, top_k=50, min_p=0.02, seed=4), 0
        ),
        "bias": SamplingInput(
            SamplingParams(temperature=0.8, logit_bias={5: 20.0, 9: -50.0}, seed=5), 0
        ),
        "penalties, some tokens ruled out": SamplingInput(
            SamplingParams(
                temperature=0.8,
                repetition_penalty=1.3,
                frequency_penalty=0.4,
                presence_penalty=0.2,
                seed=6,
            ),
            0,
            forbidden=frozenset(range(0, 32_000, 5)),
            seen=frozenset(range(0, 32_000, 2)),
            counts={token: 1 + token % 3 for token in range(0, 32_000, 4)},
            allowed=b"\x7b" * 3_000,
        ),
    }
    for name, kind in kinds.items():
        inputs = {str(row): msgspec.structs.replace(kind, position=row) for row in range(64)}
        here, there = (sample(logits.to(place), inputs).sampled for place in ("cpu", device))
        same = sum(here[row].token_id == there[row].token_id for row in inputs)
        sheet.tell(f"sampling, {name}", f"{same} of 64 tokens", "right" if same == 64 else "wrong")
