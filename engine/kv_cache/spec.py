"""The specs of layers' caches, per token or per sequence, and the KV cache groups they form.

Sizes only: no tensors, no ids. A block holds all layers of its group contiguously
(block-outermost), and a state holds all tensors of all layers of its group, so each is one span for
a copy or a transfer.
"""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

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
    tensors: ClassVar[int] = 2
    """Tensors [num_kv_heads, block_size, head_dim] of a page: K and V."""

    @property
    def token_rows(self) -> int:
        """Rows of `head_dim` numbers that one token has in a page."""
        return self.tensors * self.num_kv_heads

    def tensor_bytes(self, block_size: int) -> int:
        """Bytes of K, or of V, of `block_size` tokens in one layer."""
        return self.num_kv_heads * block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    def page_bytes(self, block_size: int) -> int:
        """Bytes of all that `block_size` tokens keep in one layer."""
        return self.tensors * self.tensor_bytes(block_size)


@dataclass(slots=True, frozen=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose tokens read all tokens before them."""


@dataclass(slots=True, frozen=True)
class LatentAttentionSpec(AttentionSpec):
    """A layer that keeps one vector per token, from which all heads get both K and V.

    DeepSeek-V2, arXiv 2405.04434. `num_kv_heads` is 1 and `head_dim` the width of the vector: the
    latent and, after it, the part of K that is rotated. All tokens before a token are read.
    """

    tensors: ClassVar[int] = 1


@dataclass(slots=True, frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer whose tokens read themselves and the `window` - 1 tokens before them."""

    window: int

    def first_needed(self, num_tokens: int) -> int:
        """The first of `num_tokens` cached tokens that the next token still reads."""
        return max(0, num_tokens - self.window + 1)


@dataclass(slots=True, frozen=True)
class StatePart:
    """One tensor of a layer's recurrent state."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, rounded up so that the one after it is aligned."""
        return round_up(prod(self.shape) * DTYPE_BYTES[self.dtype], STATE_ALIGNMENT)


@dataclass(slots=True, frozen=True)
class MambaSpec:
    """Recurrent state of one layer for one sequence: its tensors, one after the other.

    What they are is the business of the layer, which `kind` names: the last inputs of a convolution
    [K-1, D], a temporal state [heads, ...], both, or others.
    """

    kind: str
    parts: tuple[StatePart, ...]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's state."""
        return sum(part.nbytes for part in self.parts)


LayerSpec = FullAttentionSpec | LatentAttentionSpec | SlidingWindowSpec | MambaSpec


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
