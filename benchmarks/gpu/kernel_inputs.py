"""Inputs of single kernels, as layers of published models have them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.forward import AttentionCache, AttentionIndex, SequenceLens, StateIndex
from engine.ops.backend import Ops
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.ssd.parameters import SSDParameters

LAYERS = 4
"""Of states and pages, one after the other in each unit: more than a card's caches hold."""
BLOCK = 16


@dataclass(slots=True, frozen=True, kw_only=True)
class Sizes:
    """Heads of Qwen3.5-4B, those of ssd of Nemotron-H-8B; sequences and lengths to be timed.

    The first of `decodes` (sequences, tokens of each) is accepted or not.
    """

    sequences: tuple[int, ...] = (1, 32, 128)
    decodes: tuple[tuple[int, int], ...] = ((32, 8192), (1, 8192), (128, 1024))
    segment: int = 2048
    context: int = 14336
    hidden: int = 2560
    inner: int = 9216
    vocabulary: int = 248_320
    channels: int = 8192
    key_heads: int = 16
    value_heads: int = 32
    heads: int = 16
    kv_heads: int = 4
    dim: int = 256
    ssd_heads: int = 128
    ssd_groups: int = 8
    dtype: torch.dtype = torch.bfloat16

    @property
    def token_bytes(self) -> int:
        """K and V of a token in one layer."""
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize

    @classmethod
    def of(cls, *, small: bool) -> "Sizes":
        """The published sizes, or some that Triton's interpreter can bear, in float32."""
        if not small:
            return cls()
        return cls(
            sequences=(2,),
            decodes=((2, 40),),
            segment=70,
            context=20,
            hidden=64,
            inner=64,
            vocabulary=100,
            channels=40,
            key_heads=1,
            value_heads=2,
            heads=2,
            kv_heads=1,
            dim=32,
            ssd_heads=2,
            ssd_groups=1,
            dtype=torch.float32,
        )


def states_index(query_lens: list[int], device: str, *, decodes: int) -> StateIndex:
    """Units in no order, of sequences without a context, for which states do not ask."""
    lens = SequenceLens(decodes, query_lens, [0] * len(query_lens))
    return StateIndex(torch.randperm(len(query_lens)).to(device), None, lens)


@dataclass(slots=True, frozen=True)
class StateInputs:
    """Rows of tokens, the states of some layers, and a layer's weights."""

    rows: list[Tensor]
    pools: list[Tensor]
    index: StateIndex
    parameters: DeltaRuleParameters | SSDParameters

    @property
    def nbytes(self) -> int:
        """Of all states of one layer, read and written."""
        return 2 * len(self.index.units) * self.pools[0][0].nbytes

    def run(self, operator: Callable[..., Tensor], number: int) -> Tensor:
        """One layer's step or segment."""
        pool = self.pools[number % len(self.pools)]
        return operator(*self.rows, pool, self.index, parameters=self.parameters)


def _pools(units: int, shape: tuple[int, ...], device: str) -> list[Tensor]:
    """Float32 states of some layers, which lie side by side in each unit."""
    memory = torch.rand(units, LAYERS, *shape, device=device)
    return [memory[:, layer] for layer in range(LAYERS)]


def _rows(
    tokens: int, shapes: list[tuple[int, ...]], kind: torch.dtype, *, device: str
) -> list[Tensor]:
    """Slices of one wide product."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    wide = torch.randn(tokens, sum(sizes), device=device, dtype=kind)
    parts = wide.split_with_sizes(sizes, dim=1)
    return [part.view(tokens, *shape) for part, shape in zip(parts, shapes, strict=True)]


def delta_inputs(sizes: Sizes, index: StateIndex, device: str) -> StateInputs:
    """q, k, v, a and b of the batch's tokens."""
    keys, values = (sizes.key_heads, 128), (sizes.value_heads, 128)
    heads = (sizes.value_heads,)
    tokens = sum(index.lens.query_lens)
    rows = _rows(tokens, [keys, keys, values, heads, heads], sizes.dtype, device=device)
    parameters = DeltaRuleParameters(
        rate=-torch.rand(heads, device=device), dt_bias=torch.rand(heads, device=device)
    )
    return StateInputs(rows, _pools(len(index.units), (*values, 128), device), index, parameters)


def duality_inputs(sizes: Sizes, index: StateIndex, device: str) -> StateInputs:
    """x, dt, b and c of the batch's tokens."""
    heads, groups = (sizes.ssd_heads,), (sizes.ssd_groups, 128)
    tokens = sum(index.lens.query_lens)
    rows = _rows(tokens, [(*heads, 64), heads, groups, groups], sizes.dtype, device=device)
    ones = torch.ones(heads, device=device)
    parameters = SSDParameters(a=-ones, dt_bias=ones, d=ones)
    return StateInputs(rows, _pools(len(index.units), (*heads, 64, 128), device), index, parameters)


@dataclass(slots=True, frozen=True)
class AttentionInputs:
    """q, k and v of a batch, and the pages of some layers."""

    rows: tuple[Tensor, Tensor, Tensor]
    caches: list[AttentionCache]
    index: AttentionIndex

    def run(self, ops: Ops, number: int) -> Tensor:
        """One layer's attention."""
        q, k, v = self.rows
        cache = self.caches[number % len(self.caches)]
        scale = q.shape[2] ** -0.5
        return ops.paged_attention(q, k, v, cache, self.index, scale=scale, window=None)


def attention_inputs(
    sizes: Sizes,
    query_lens: list[int],
    context_lens: list[int],
    *,
    device: str,
    decodes: int | None = None,
) -> AttentionInputs:
    """Sequences whose pages lie in no order; all are decodes unless it is said how many are."""
    ends = [sum(pair) for pair in zip(query_lens, context_lens, strict=True)]
    blocks = -(-max(ends) // BLOCK)
    tables = torch.randperm(len(ends) * blocks).view(len(ends), blocks)
    kv_heads, dim, kind = sizes.kv_heads, sizes.dim, sizes.dtype
    positions = [
        torch.arange(context, end) for context, end in zip(context_lens, ends, strict=True)
    ]
    slots = torch.cat(
        [
            ((table[at // BLOCK, None] * kv_heads + torch.arange(kv_heads)) * BLOCK)
            + (at % BLOCK).unsqueeze(1)
            for table, at in zip(tables, positions, strict=True)
        ]
    )
    caches = []
    for _ in range(LAYERS):
        pages = torch.randn(2, tables.numel(), kv_heads, BLOCK, dim, device=device, dtype=kind)
        k, v = pages
        caches.append(AttentionCache(k, v, k.view(-1, dim), v.view(-1, dim)))
    tokens = sum(query_lens)
    q = torch.randn(tokens, sizes.heads, dim, device=device, dtype=kind)
    k, v = torch.randn(2, tokens, kv_heads, dim, device=device, dtype=kind)
    count = len(ends) if decodes is None else decodes
    index = AttentionIndex(
        tables.to(device),
        slots.flatten().to(device),
        torch.cat(positions).to(device),
        SequenceLens(count, query_lens, context_lens),
    )
    return AttentionInputs((q, k, v), caches, index)
