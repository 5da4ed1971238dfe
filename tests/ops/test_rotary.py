"""Frequencies of every kind of rope are those of transformers; rotation against pairs in turn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.layers.rotary import Rotary, frequencies
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.rope import RopeConfig, read_rope
from engine.ops.backend import Rotate, torch_ops
from engine.ops.rotary import fast, naive
from engine.ops.rotary.native import NativeRotate
from tests.ops.native import native_kernels

CPU = torch.device("cpu")
HEAD_DIM, POSITIONS = 24, 4096
FACTOR = st.floats(1.0, 64.0)
ORIGINAL = st.integers(64, POSITIONS)


def optional(**own: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    return {key: st.one_of(st.none(), values) for key, values in own.items()}


KINDS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "linear": st.fixed_dictionaries({"factor": FACTOR}),
    "dynamic": st.fixed_dictionaries({"factor": FACTOR}),
    "llama3": st.fixed_dictionaries(
        {
            "factor": FACTOR,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(3.0, 9.0),
            "original_max_position_embeddings": ORIGINAL,
        }
    ),
    "yarn": st.fixed_dictionaries(
        {"factor": st.one_of(st.none(), FACTOR), "original_max_position_embeddings": ORIGINAL},
        optional=optional(
            attention_factor=st.floats(0.5, 2.0),
            mscale=st.floats(0.5, 1.5),
            mscale_all_dim=st.floats(0.5, 1.5),
            beta_fast=st.floats(8.0, 64.0),
            beta_slow=st.floats(0.5, 4.0),
        )
        | {"truncate": st.booleans()},
    ),
    "longrope": st.fixed_dictionaries(
        {
            "factor": FACTOR,
            "short_factor": st.lists(st.floats(1.0, 8.0), min_size=12, max_size=12),
            "long_factor": st.just([100.0] * 12),
            "original_max_position_embeddings": st.just(POSITIONS),
        },
        optional=optional(attention_factor=st.floats(0.5, 2.0)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), theta=st.floats(100.0, 1e7), partial=st.sampled_from([0.25, 0.5]))
def test_frequencies_and_magnitude(
    kind: str, data: st.DataObject, theta: float, partial: float
) -> None:
    drawn = data.draw(KINDS[kind])
    if kind == "longrope":
        partial = 1.0  # its factors are one for each pair of channels
    scaling = {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": partial, **drawn}
    sizes = {"head_dim": HEAD_DIM, "max_position_embeddings": POSITIONS}
    theirs = LlamaConfig(**sizes, rope_parameters=dict(scaling))
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](theirs, CPU)
    rope = read_rope(ConfigReader({**sizes, "rope_scaling": scaling}, "config.json"), HEAD_DIM)
    torch.testing.assert_close(frequencies(rope, CPU), expected, rtol=3e-7, atol=0.0)
    assert rope.magnitude == pytest.approx(magnitude)


def test_the_magnitude_is_of_cosines_and_of_sines() -> None:
    plain, grown = (
        Rotary(RopeConfig(1e4, 8, magnitude=size), torch.float32, CPU, ops=torch_ops())._tables[-1]
        for size in (1.0, 1.5)
    )
    assert torch.equal(1.5 * plain, grown)


def torch_rotate(model: torch.dtype) -> Rotate:
    return fast.rotate_


def native_rotate(model: torch.dtype) -> Rotate:
    return NativeRotate(native_kernels(model))


@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("backend", [torch_rotate, native_rotate])
@given(rows=st.integers(1, 5), heads=st.integers(1, 4), half=st.integers(1, 40), rest=st.just(3))
@settings(max_examples=15, deadline=None)
def test_heads_are_rotated_where_they_lie(
    backend: Callable[[torch.dtype], Rotate],
    model: torch.dtype,
    *,
    wide: bool,
    rows: int,
    heads: int,
    half: int,
    rest: int,
) -> None:
    """Nothing else in their rows changes: other channels of a head, and what lies between rows."""
    draw = torch.Generator().manual_seed(half)
    size = 2 * half + rest
    ours = torch.randn(rows, heads * size + 7, generator=draw).to(model)
    truth = ours.clone()
    table = torch.randn(rows, 2, 2 * half, generator=draw).to(torch.float32 if wide else model)
    rotary = table.transpose(0, 1).unsqueeze(2)
    for x, rotate_ in ((ours, backend(model)), (truth, naive.rotate_)):
        rotate_(x[:, : heads * size].view(rows, heads, size), rotary)
    # Torch rounds each of the two products to bfloat16.
    near = 1e-6 if model == torch.float32 else 2**-6
    torch.testing.assert_close(ours, truth, rtol=near, atol=near)
