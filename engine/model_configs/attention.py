"""Settings of attention and latent attention, and which layers have it. Torch-free."""

from dataclasses import dataclass
from enum import StrEnum

from engine.kv_cache.spec import FullAttentionSpec, LatentAttentionSpec, SlidingWindowSpec
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.rope import RopeConfig, read_rope

FULL = "full_attention"


class QKNorm(StrEnum):
    """The norms of q and k before they are rotated: each head has its own sum, or all share one."""

    NONE = "none"
    BY_HEAD = "by head"
    ALL_HEADS = "all heads"


@dataclass(slots=True, frozen=True, kw_only=True)
class AttentionConfig:
    """`bias` is for all four projections; `rope` None: no positional encoding.

    Scores are q k^T * `scale`. `window`: a token reads itself and the `window` - 1 tokens before it
    (None: all). `gated`: q_proj also gives a sigmoid gate. `input_scale` and `output_scale`
    multiply what goes in and comes out.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    bias: bool = False
    rope: RopeConfig | None = None
    window: int | None = None
    qk_norm: QKNorm = QKNorm.NONE
    gated: bool = False
    input_scale: float = 1.0
    output_scale: float = 1.0

    def spec(self, dtype: str) -> FullAttentionSpec | SlidingWindowSpec:
        """The cache contents of one such layer per token."""
        if self.window is None:
            return FullAttentionSpec(self.num_kv_heads, self.head_dim, dtype)
        return SlidingWindowSpec(self.num_kv_heads, self.head_dim, dtype, self.window)


def read_attention(reader: ConfigReader, rotary: float | None = None) -> AttentionConfig:
    """Reads heads, sizes and bias by their common names; scores are scaled by head_dim^-0.5.

    `rotary`: the part of each head that is rotated where the file does not say it (`read_rope`);
    None: no positional encoding. Raises CheckpointError.
    """
    heads = reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", heads)
    reader.require_divisor(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))
    default = reader.size("hidden_size") // heads
    head_dim = reader.size("head_dim", reader.size("attention_head_dim", default))
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        bias=reader.get("attention_bias", bool, False),
        scale=head_dim**-0.5,
        rope=None if rotary is None else read_rope(reader, head_dim, rotary),
    )


@dataclass(slots=True, frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), without rotation.

    Of each token a latent of `kv_lora_rank` channels is kept, and `qk_rope_head_dim` channels of
    keys that all heads share. From the latent a head gets its other `qk_nope_head_dim` channels of
    a key and `v_head_dim` of a value. Queries come from a latent of their own where `q_lora_rank`
    is set. Scores are q k^T * `scale`; `norm_eps` is of the latents' norms.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    norm_eps: float
    q_lora_rank: int | None = None

    @property
    def qk_head_dim(self) -> int:
        """Channels of one head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def width(self) -> int:
        """Channels that are kept of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def spec(self, dtype: str) -> LatentAttentionSpec:
        """The cache contents of one such layer per token."""
        return LatentAttentionSpec(1, self.width, dtype)


def read_latent_attention(reader: ConfigReader) -> LatentAttentionConfig:
    """Reads heads, ranks and sizes by the names of DeepSeek-V2. Raises CheckpointError."""
    heads = reader.size("num_attention_heads")
    reader.require_one_of("num_key_value_heads", [heads])
    reader.require_one_of("attention_bias", [False])
    nope = reader.size("qk_nope_head_dim")
    rope = reader.size("qk_rope_head_dim")
    return LatentAttentionConfig(
        num_heads=heads,
        kv_lora_rank=reader.size("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=reader.size("v_head_dim"),
        scale=(nope + rope) ** -0.5,
        # The models' own code makes these norms with its class's default, not `rms_norm_eps`.
        norm_eps=1e-6,
        q_lora_rank=reader.optional_size("q_lora_rank"),
    )


def read_layer_types(
    reader: ConfigReader, other: str, *, key: str, interval: int
) -> tuple[str, ...]:
    """FULL or `other` for each layer; by default every n-th is FULL, by the file's `key`.

    `interval`: n where the file has no `key`. Raises CheckpointError.
    """
    interval = reader.size(key, interval)
    layers = range(1, 1 + reader.num_layers)
    default = [other if layer % interval else FULL for layer in layers]
    return reader.layer_types(default, (other, FULL))
