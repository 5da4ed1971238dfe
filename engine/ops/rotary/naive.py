"""Rotary embedding, one pair of channels after the other: the truth for the others."""

from torch import Tensor


def rotate_(x: Tensor, rotary: Tensor) -> None:
    """See `engine.ops.backend.Rotate`: channels i and i + half turn by one angle, in float32."""
    cos, sin = rotary.float().unbind()
    before, half = x.clone().float(), cos.shape[-1] // 2
    for i in range(half):
        j = i + half
        first, second = before[..., i], before[..., j]
        # The table has the sign of the sine in its first half.
        x[..., i] = first * cos[..., i] + second * sin[..., i]
        x[..., j] = second * cos[..., j] + first * sin[..., j]
