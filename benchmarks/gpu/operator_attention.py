"""Attention over pages, beside the naive one, whose queries are float32."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.operator_batches import CONTEXT, DECODES, Trial
from engine.forward import AttentionCache, AttentionIndex
from engine.ops.paged_attention import naive

BLOCK = 16


class Heads(NamedTuple):
    """Of queries and of K and V; a single one of the latter has latents, which are K and V."""

    heads: int
    kv_heads: int
    dim: int


class Places(NamedTuple):
    """Pages in no order, of the sequences without padding."""

    pages: int
    tables: Tensor
    slots: Tensor


def attention(trial: Trial, sizes: Heads, *, window: int | None = None) -> None:
    """Decodes and segments at once, and the pages afterwards."""
    heads, kv_heads, dim = sizes
    latent, places = kv_heads == 1, _places(trial, kv_heads)
    pages = torch.randn(2, places.pages, kv_heads, BLOCK, dim).to(trial.dtype)
    q = torch.randn(trial.tokens, heads, dim).to(trial.dtype)
    k, v = torch.randn(2, trial.tokens, kv_heads, dim).to(trial.dtype)
    # Slot -1 would be the end of the first of these pages, of which the column knows nothing.
    memory = torch.cat([torch.zeros_like(pages[:, :1]), pages], dim=1).to(trial.device, copy=True)
    there = _cache(memory[:, 1:], latent=latent)
    rows = trial.rows(q, k, v)
    found = trial.ops.paged_attention(
        rows[0],
        rows[1],
        None if latent else rows[2],
        there,
        _index(trial, places, kv_heads),
        scale=dim**-0.5,
        window=window,
    )
    here = _cache(pages, latent=latent)
    naive.write_tokens(k, None if latent else v, here, places.slots)
    truth, at = [], 0
    for number, length in enumerate(trial.query_lens):
        # The naive one has the dtype of the queries; the truth shall not be rounded.
        part = q[at : at + length].float()
        own = places.tables[number]
        truth.append(
            naive.prefill(part, here, own, context=CONTEXT[number], scale=dim**-0.5, window=window)
        )
        at += length
    expected = torch.cat(truth).reshape(trial.tokens, -1)
    case = f"paged attention {heads}/{kv_heads} of {dim}, window {window}"
    kept = trial.kept(found)
    trial.near(f"{case}, decodes", kept[:DECODES], expected[:DECODES], limit=trial.limit)
    trial.near(f"{case}, prefills", kept[DECODES:], expected[DECODES:], limit=trial.limit)
    same = torch.equal(memory[:, 1:].cpu(), pages) and not memory[:, 0].any()
    figure = "as written" if same else "others"
    trial.sheet.tell(f"{trial.name}: {case}, pages", figure, "right" if same else "wrong")


def _cache(pages: Tensor, *, latent: bool) -> AttentionCache:
    k, v = pages[0], pages[0 if latent else 1]
    dim = pages.shape[-1]
    return AttentionCache(k, v, k.view(-1, dim), v.view(-1, dim))


def _ends(trial: Trial) -> list[int]:
    return [sum(pair) for pair in zip(CONTEXT, trial.query_lens, strict=True)]


def _places(trial: Trial, kv_heads: int) -> Places:
    ends, lens = _ends(trial), trial.query_lens
    counts = [-(-end // BLOCK) for end in ends]
    rows = torch.randperm(sum(counts) + 3)
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int64)
    slots, first = [], 0
    for number, (count, context, end) in enumerate(zip(counts, CONTEXT, ends, strict=True)):
        tables[number, :count] = rows[first : first + count]
        first += count
        for at in range(context, end):
            row = int(tables[number, at // BLOCK])
            slots += [(row * kv_heads + head) * BLOCK + at % BLOCK for head in range(kv_heads)]
    return Places(len(rows), tables, torch.tensor(slots))


def _index(trial: Trial, places: Places, kv_heads: int) -> AttentionIndex:
    """With rows of padding: slots -1, position 0, and a table that names a page."""
    pads, split = trial.pads, DECODES * kv_heads
    tables = torch.cat(
        [places.tables[:DECODES], places.tables[:1].repeat(pads, 1), places.tables[DECODES:]]
    )
    slots = torch.cat(
        [places.slots[:split], torch.full((pads * kv_heads,), -1), places.slots[split:]]
    )
    positions = torch.cat([torch.arange(*span) for span in zip(CONTEXT, _ends(trial), strict=True)])
    positions = torch.cat(
        [positions[:DECODES], torch.zeros(pads, dtype=torch.int64), positions[DECODES:]]
    )
    device = trial.device
    return AttentionIndex(tables.to(device), slots.to(device), positions.to(device), trial.lens)
