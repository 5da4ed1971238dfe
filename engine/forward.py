"""The input of a forward pass besides weights: the packed batch, and views of the arena per layer.

Passed as an argument everywhere; there is no ambient context. Nothing here knows requests.

A batch is packed: first `num_decodes` sequences of one token each, then the prefill segments, end
to end.

    token row   0 .. num_decodes-1 | segment 0 | segment 1 | ...
    query_lens  1, 1, ..., 1       | q0        | q1        | ...
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(slots=True, frozen=True)
class AttentionCache:
    """K and V pages of one attention layer, as views of the whole arena.

    `*_pages` are [rows, num_kv_heads, block_size, head_dim] (head-major), indexed by
    `block_tables`; `*_tokens` are the same bytes as [rows * num_kv_heads * block_size, head_dim],
    indexed by `slot_mapping`. The layer's offset is in the view, so one table serves all layers of
    a group. Of latent attention, V is K.
    """

    k_pages: Tensor
    v_pages: Tensor
    k_tokens: Tensor
    v_tokens: Tensor


@dataclass(slots=True, frozen=True)
class StateCache:
    """The tensors [units, ...] of one layer's states, by unit, in the order of its spec."""

    parts: tuple[Tensor, ...]


LayerCache = AttentionCache | StateCache
LayerCaches = dict[tuple[int, int], LayerCache]
"""Keyed by (KV cache group, layer index in the model)."""


@dataclass(slots=True, frozen=True)
class SequenceLens:
    """The lengths of a batch's sequences; all KV cache groups share it.

    `query_lens`: tokens in this batch, 1 for the first `num_decodes` sequences. `context_lens`:
    tokens already in the cache before this step.
    """

    num_decodes: int
    query_lens: list[int]
    context_lens: list[int]


@dataclass(slots=True, frozen=True)
class AttentionIndex:
    """The places of an attention group's tokens: rows of pages to read, rows of tokens to write.

    `block_tables` int64 [sequences, max_blocks] (unused tail entries point at any valid row);
    `slot_mapping` int64 [tokens * num_kv_heads], heads fastest, -1 of a row of padding; `positions`
    int64 [tokens], those of the batch.
    """

    block_tables: Tensor
    slot_mapping: Tensor
    positions: Tensor
    lens: SequenceLens


@dataclass(slots=True, frozen=True)
class StateExport:
    """A state to keep from inside a step: after `offset` tokens of prefill segment `segment`.

    `segment` counts the prefill segments only; 0 < `offset` <= its length; `unit` receives it.
    """

    segment: int
    offset: int
    unit: int


@dataclass(slots=True, frozen=True)
class StateIndex:
    """The unit that holds each sequence's state: `units` int64 [sequences]; -1 of a row of padding.

    `decode_run` is the same information for the decodes when their units are consecutive and
    ascending: then states are updated in place through a slice, without gather and scatter.
    `exports`: states to keep from inside the step, ordered by segment and offset.
    """

    units: Tensor
    decode_run: slice | None
    lens: SequenceLens
    exports: tuple[StateExport, ...] = ()


GroupIndex = AttentionIndex | StateIndex


@dataclass(slots=True)
class ForwardBatch:
    """One step's packed input. `group_index[g]` belongs to KV cache group g.

    `token_ids`, `positions`: int64 [tokens]. `logits_rows`: int64, the token rows whose logits are
    wanted.
    """

    token_ids: Tensor
    positions: Tensor
    lens: SequenceLens
    group_index: tuple[GroupIndex, ...]
    logits_rows: Tensor
