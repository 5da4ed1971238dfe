"""Frequencies of every kind of rope, read from config.json, are those of transformers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.layers.rotary import Rotary, frequencies
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.rope import RopeConfig, read_rope

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
        Rotary(RopeConfig(1e4, 8, magnitude=size), torch.float32, CPU)._table for size in (1.0, 1.5)
    )
    assert torch.equal(1.5 * plain, grown)
