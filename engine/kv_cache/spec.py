"""The specs of layers' caches, per token or per sequence, and the KV cache groups they form.

Sizes only: no tensors, no ids. A block holds all layers of its group contiguously
(block-outermost), and a state holds the conv and temporal tensors of all layers of its group, so
each is one span for a copy or a transfer.
"""

from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_ALIGNMENT = 256


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(slots=True, frozen=True)
class AttentionSpec:
    """K and V of one layer; a page is [K|V, num_kv_heads, block_size, head_dim] (head-major)."""

    num_kv_heads: int
    head_dim: int
    dtype: str

    def page_bytes(self, block_size: int) -> int:
        """Bytes of K and V of `block_size` tokens in one layer."""
        return 2 * self.num_kv_heads * block_size * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(slots=True, frozen=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose tokens read all tokens before them."""


@dataclass(slots=True, frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer whose tokens read themselves and the `window` - 1 tokens before them."""

    window: int

    def first_needed(self, num_tokens: int) -> int:
        """The first of `num_tokens` cached tokens that the next token still reads."""
        return max(0, num_tokens - self.window + 1)


@dataclass(slots=True, frozen=True)
class MambaSpec:
    """Recurrent state of one layer for one sequence: conv rows [K-1, D] and a temporal tensor.

    `conv_shape` is token-major (K-1 rows of D channels) in `conv_dtype`; `temporal_shape` is
    [heads, ...] in `temporal_dtype` (float32 unless a model says otherwise).
    """

    kind: str
    conv_shape: tuple[int, int]
    conv_dtype: str
    temporal_shape: tuple[int, int, int]
    temporal_dtype: str = "float32"

    @property
    def conv_bytes(self) -> int:
        """Bytes of the conv rows, rounded up so that the temporal tensor after them is aligned."""
        return round_up(prod(self.conv_shape) * DTYPE_BYTES[self.conv_dtype], STATE_ALIGNMENT)

    @property
    def temporal_bytes(self) -> int:
        """Bytes of the temporal tensor, rounded so that the next layer's conv rows are aligned."""
        nbytes = prod(self.temporal_shape) * DTYPE_BYTES[self.temporal_dtype]
        return round_up(nbytes, STATE_ALIGNMENT)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's state."""
        return self.conv_bytes + self.temporal_bytes


LayerSpec = FullAttentionSpec | SlidingWindowSpec | MambaSpec


@dataclass(slots=True, frozen=True)
class KVCacheGroup:
    """Layers (by index in the model) that share a spec and so a block table or a state slot.

    `block_size`: tokens per block where it differs from the node's.
    """

    spec: LayerSpec
    layers: tuple[int, ...]
    block_size: int | None = None

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block (attention) or of one whole state (Mamba), all layers of the group."""
        if isinstance(self.spec, MambaSpec):
            return len(self.layers) * self.spec.layer_bytes
        return len(self.layers) * self.spec.page_bytes(self.block_size or block_size)


def form_groups(layer_specs: tuple[tuple[LayerSpec, ...], ...]) -> tuple[KVCacheGroup, ...]:
    """Groups of layers with equal specs, in order of first appearance.

    `layer_specs[i]` lists what layer i keeps: nothing (MLP), one spec, or several (attention and
    Mamba in parallel).
    """
    layers_of: dict[LayerSpec, list[int]] = {}
    for index, specs in enumerate(layer_specs):
        for spec in specs:
            layers_of.setdefault(spec, []).append(index)
    return tuple(KVCacheGroup(spec, tuple(layers)) for spec, layers in layers_of.items())
