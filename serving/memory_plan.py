"""Bytes that a node takes of a device: weights, arena, graphs, temporaries. Torch-free.

    | weights | arena | decode graphs | largest chunk | logits | reserve |    free    |
    '------------------------------ the card ------------------------------------------'

Weights and arena are exact up to small tensors that stay in float32. The others are estimates from
above, of the widest layer as if all of its numbers were float32 at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Final

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import DTYPE_BYTES, MambaSpec
from engine.model_configs.attention import AttentionConfig, LatentAttentionConfig
from engine.model_configs.feed_forward import ExpertsConfig, MLPConfig
from engine.model_configs.model_config import HEAD, ModelConfig, PartConfig, renamed
from engine.model_configs.recurrent import (
    GatedDeltaNetConfig,
    Mamba1Config,
    Mamba2Config,
    ShortConvConfig,
)
from engine.safetensors_headers import FLOAT_DTYPES, StoredTensor, scaled_by
from engine.step import MAX_STOPS
from serving.config import NodeConfig

WIDE: Final = 4
"""Bytes of a float32."""
INDEX: Final = 8
"""Bytes of a number of a table, a position, a unit."""
SCAN_CHUNK: Final = 64
"""Tokens after which the chunked scan of a prefill keeps a layer's state."""
MAX_SPLITS, MIN_SPLIT = 64, 256
"""Parts of a sequence that decode attention sums apart, and their tokens at least."""
RESERVE_BYTES: Final = 1 << 30
"""For the context of CUDA, the libraries' workspaces, the staging of a load, and fragments."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Batch:
    """The largest steps: tokens of a prefill, sequences of a decode, and tokens of a sequence."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int

    @classmethod
    def of(cls, config: NodeConfig, *, max_model_len: int) -> "Batch":
        """Of a node with these options."""
        return cls(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
        )


@dataclass(slots=True, frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device by what they are for."""

    weights: int
    arena: int
    graphs: int
    chunk: int
    logits: int

    @property
    def beside_arena(self) -> int:
        """All that the arena has to leave room for."""
        return self.weights + self.graphs + self.chunk + self.logits + RESERVE_BYTES

    @property
    def total(self) -> int:
        """Bytes that the node takes."""
        return self.arena + self.beside_arena


def plan_memory(
    model: ModelConfig, stored: Iterable[StoredTensor], arena: ArenaPlan, *, batch: Batch
) -> MemoryPlan:
    """The plan of a node that computes `batch` at most; `stored`: what the headers of files say.

    A token has n numbers at once: 4 x hidden and the widest part's. In bytes,

    - chunk: tokens x 4n, the K and V of a whole sequence in one layer, and a state per 64 tokens;
    - logits: sequences x vocabulary x 12: they, and sorted copies when tokens are drawn;
    - graphs: sequences x 4n, for all sizes in one pool, the partial sums of decode attention, and
      their inputs: of each sequence ids, positions, stops, units and block tables of 8 bytes.
    """
    n = _numbers_of_a_token(model)
    rows, tokens = batch.max_num_seqs, max(batch.max_num_batched_tokens, batch.max_num_seqs)
    sequence, state = _largest_of_a_layer(arena, batch.max_model_len)
    tables = (arena.blocks_for(group, batch.max_model_len) for group in arena.attention_groups)
    inputs = INDEX * (3 + MAX_STOPS + len(arena.state_groups) + sum(tables))
    return MemoryPlan(
        weights=weight_bytes(model, stored),
        arena=arena.arena_bytes,
        graphs=rows * (WIDE * (n + _partial_sums(model, batch.max_model_len)) + inputs),
        chunk=tokens * WIDE * n + sequence + -(-tokens // SCAN_CHUNK) * state,
        logits=rows * 3 * WIDE * model.vocab_size,
    )


def weight_bytes(model: ModelConfig, stored: Iterable[StoredTensor]) -> int:
    """Bytes of the tensors that the model loads, in its dtype.

    A head that the config ties counts as one with the embeddings, also where it is stored.
    """
    tensors = list(stored)
    names = {it.name for it in tensors}
    total = 0
    for it in tensors:
        name = renamed(it.name, model.renames)
        is_tied = name == HEAD and model.tie_word_embeddings
        is_taken = name is not None and it.dtype in FLOAT_DTYPES and not is_tied
        is_scale = model.quantization is not None and scaled_by(it.name, names) is not None
        if is_taken and not is_scale:
            total += prod(it.shape) * DTYPE_BYTES[model.dtype]
    return total


def memory_report(plan: MemoryPlan, device: str, available: int | None = None) -> str:
    """The plan in lines; with `available` bytes also what is left, or what is too much."""
    rows = [
        ("weights", plan.weights),
        ("arena", plan.arena),
        ("decode graphs, estimated", plan.graphs),
        ("the largest prefill chunk, estimated", plan.chunk),
        ("logits, estimated", plan.logits),
        ("CUDA, libraries and fragments", RESERVE_BYTES),
        ("all of it", plan.total),
    ]
    if available is not None:
        left = available - plan.total
        rows += [
            (f"left of {available:,}" if left >= 0 else f"missing from {available:,}", abs(left)),
            ("the largest arena that fits", max(0, available - plan.beside_arena)),
        ]
    lines = [f"    {name:<38}{nbytes:>20,}" for name, nbytes in rows]
    return "\n".join([f"bytes on {device}:", *lines])


def _numbers_of_a_token(model: ModelConfig) -> int:
    parts = (part for layer in model.layers for block in layer for _, part in block.parts)
    return 4 * model.hidden_size + max(_width(part, model.hidden_size) for part in parts)


def _partial_sums(model: ModelConfig, max_model_len: int) -> int:
    """Numbers that decode attention keeps of one sequence in one layer: a value for each split."""
    splits = min(MAX_SPLITS, -(-max_model_len // MIN_SPLIT))
    parts = [part for layer in model.layers for block in layer for _, part in block.parts]
    heads = [it.num_heads * it.head_dim for it in parts if isinstance(it, AttentionConfig)]
    heads += [it.num_heads * it.width for it in parts if isinstance(it, LatentAttentionConfig)]
    return splits * max(heads, default=0)


def _width(part: PartConfig, hidden: int) -> int:
    """Numbers of a token that are there at once in a part, its inputs and outputs left out."""
    match part:
        case MLPConfig():
            # Gate and up side by side, and their product.
            return 3 * part.intermediate_size
        case ExpertsConfig():
            rows = part.router.top_k
            return rows * (3 * part.intermediate_size + 2 * (part.latent_size or hidden))
        case AttentionConfig():
            return part.head_dim * (4 * part.num_heads + 2 * part.num_kv_heads)
        case LatentAttentionConfig():
            return part.num_heads * (2 * part.qk_head_dim + 2 * part.width) + part.width
        case Mamba1Config():
            return part.inner_size * (4 + 2 * part.state_size)
        case Mamba2Config():
            return sum(part.projected_sizes) + part.conv_dim + 2 * part.inner_size
        case GatedDeltaNetConfig():
            return 2 * part.conv_dim + 4 * part.values
        case ShortConvConfig():
            return 5 * part.channels
    return 8 * part.num_heads * part.head_dim


def _largest_of_a_layer(arena: ArenaPlan, max_model_len: int) -> tuple[int, int]:
    """Bytes of the K and V of the longest sequence in one layer, and of one layer's state."""
    sequence = state = 0
    for index, group in enumerate(arena.groups):
        if isinstance(group.spec, MambaSpec):
            state = max(state, group.spec.layer_bytes)
        else:
            blocks = arena.blocks_for(index, max_model_len)
            sequence = max(sequence, blocks * arena.block_bytes(index) // len(group.layers))
    return sequence, state
