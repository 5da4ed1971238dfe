"""Layers with a state write the states that a step exports into their units, beside decodes."""

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.forward import ForwardBatch, SequenceLens, StateCache, StateExport, StateIndex
from engine.layers.gated_delta_net import GatedDeltaNet
from engine.layers.lightning_attention import LightningAttention
from engine.layers.mamba1 import Mamba1
from engine.layers.mamba2 import Mamba2
from engine.layers.mixer import ForwardPass
from engine.layers.short_conv import ShortConv
from engine.model_configs.model_config import ModelConfig
from engine.model_configs.recurrent import (
    GatedDeltaNetConfig,
    LightningAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    ShortConvConfig,
)
from engine.ops.backend import torch_ops
from engine.weights.files import WeightFiles
from engine.weights.weights import Weights

HIDDEN, HEADS, DIM, KERNEL, UNITS = 16, 4, 8, 4, 9
CONV = 64  # channels through the convolution, in all layers that have one
MODEL = ModelConfig(
    vocab_size=1,
    hidden_size=HIDDEN,
    max_position_embeddings=1,
    tie_word_embeddings=True,
    rms_norm_eps=1e-6,
    dtype="float32",
    layers=((),) * 3,
)

Layer = GatedDeltaNet | Mamba1 | Mamba2 | ShortConv | LightningAttention


def gated_delta_net(weights: Weights) -> Layer:
    config = GatedDeltaNetConfig(
        key_heads=2, value_heads=HEADS, key_dim=DIM, value_dim=DIM, conv_kernel=KERNEL
    )
    return GatedDeltaNet(config, weights.below("m"), MODEL, (0, 0))


def mamba1(weights: Weights) -> Layer:
    config = Mamba1Config(
        inner_size=CONV,
        state_size=HEADS,
        dt_rank=2,
        conv_kernel=KERNEL,
        conv_bias=False,
        proj_bias=False,
    )
    return Mamba1(config, weights.below("m"), MODEL, (0, 0))


def mamba2(weights: Weights) -> Layer:
    config = Mamba2Config(
        num_heads=HEADS,
        head_dim=DIM,
        state_size=DIM,
        n_groups=2,
        conv_kernel=KERNEL,
        conv_bias=False,
        in_proj_bias=False,
        out_proj_bias=False,
        time_step_limit=(0.0, inf),
    )
    return Mamba2(config, weights.below("m"), MODEL, (0, 0))


def short_conv(weights: Weights) -> Layer:
    config = ShortConvConfig(channels=CONV, conv_kernel=KERNEL)
    return ShortConv(config, weights.below("m"), MODEL, (0, 0))


def lightning_attention(weights: Weights) -> Layer:
    config = LightningAttentionConfig(num_heads=HEADS, head_dim=DIM)
    return LightningAttention(config, weights.below("m"), MODEL, (0, 0))


BOTH = {
    "conv1d.weight": (CONV, 1, KERNEL),
    "A_log": (HEADS,),
    "dt_bias": (HEADS,),
    "out_proj.weight": (HIDDEN, HEADS * DIM),
}
SHAPES: dict[Callable[[Weights], Layer], dict[str, tuple[int, ...]]] = {
    gated_delta_net: {
        "in_proj_qkv.weight": (CONV, HIDDEN),
        "in_proj_z.weight": (HEADS * DIM, HIDDEN),
        "in_proj_b.weight": (HEADS, HIDDEN),
        "in_proj_a.weight": (HEADS, HIDDEN),
        "norm.weight": (DIM,),
        **BOTH,
    },
    mamba1: {
        "conv1d.weight": (CONV, 1, KERNEL),
        "in_proj.weight": (2 * CONV, HIDDEN),
        "x_proj.weight": (2 + 2 * HEADS, CONV),
        "dt_layernorm.weight": (2,),
        "b_layernorm.weight": (HEADS,),
        "c_layernorm.weight": (HEADS,),
        "dt_proj.weight": (CONV, 2),
        "dt_proj.bias": (CONV,),
        "A_log": (CONV, HEADS),
        "D": (CONV,),
        "out_proj.weight": (HIDDEN, CONV),
    },
    mamba2: {
        "in_proj.weight": (HEADS * DIM + CONV + HEADS, HIDDEN),
        "D": (HEADS,),
        "norm.weight": (HEADS * DIM,),
        **BOTH,
    },
    short_conv: {
        "in_proj.weight": (3 * CONV, HIDDEN),
        "conv.weight": (CONV, 1, KERNEL),
        "out_proj.weight": (HIDDEN, CONV),
    },
    lightning_attention: {
        "qkv_proj.weight": (3 * HEADS * DIM, HIDDEN),
        "output_gate.weight": (HEADS * DIM, HIDDEN),
        "norm.weight": (HEADS * DIM,),
        "out_proj.weight": (HIDDEN, HEADS * DIM),
    },
}


@pytest.fixture(params=SHAPES, ids=lambda build: build.__name__)
def layer(request: pytest.FixtureRequest, tmp_path: Path) -> Layer:
    draw = torch.Generator().manual_seed(1)
    shapes = SHAPES[request.param]
    stored = {f"m.{name}": torch.randn(shape, generator=draw) / 3 for name, shape in shapes.items()}
    save_file(stored, tmp_path / "model.safetensors")
    build: Callable[[Weights], Layer] = request.param
    with WeightFiles(tmp_path) as files:
        return build(
            Weights(files, torch.float32, torch.device("cpu"), ops=torch_ops(), renames=())
        )


def random_cache(layer: Layer) -> StateCache:
    """The same contents every time."""
    draw = torch.Generator().manual_seed(2)
    temporal = (HEADS, CONV) if isinstance(layer, Mamba1) else (HEADS, DIM, DIM)
    shapes: tuple[tuple[int, ...], ...] = ((KERNEL - 1, CONV), temporal)
    if isinstance(layer, ShortConv | LightningAttention):
        shapes = shapes[:1] if isinstance(layer, ShortConv) else shapes[1:]
    return StateCache(tuple(torch.randn(UNITS, *shape, generator=draw) for shape in shapes))


def step(
    layer: Layer,
    x: Tensor,
    cache: StateCache,
    *,
    lens: list[int],
    units: list[int],
    exports: tuple[StateExport, ...] = (),
) -> Tensor:
    """One forward pass; as everywhere, sequences of one token are the decodes and come first."""
    none = torch.zeros(0, dtype=torch.int64)
    lengths = SequenceLens(lens.count(1), lens, [])
    index = StateIndex(torch.tensor(units), None, lengths, exports)
    batch = ForwardBatch(none, none, lengths, (index,), none)
    return layer(x, None, ForwardPass(batch, {(0, 0): cache}, {}))


def assert_unit(ours: StateCache, unit: int, truth: StateCache, source: int) -> None:
    for own, other in zip(ours.parts, truth.parts, strict=True):
        torch.testing.assert_close(own[unit], other[source], rtol=2e-5, atol=2e-5)


LENS, SEQUENCES = [1, 1, 100, 40], [0, 3, 1, 2]
EXPORTS = (StateExport(0, 2, 7), StateExport(0, 70, 4), StateExport(1, 33, 5))
X = torch.randn(sum(LENS), HIDDEN, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("export", EXPORTS, ids=str)
def test_a_unit_receives_the_state_at_its_offset(layer: Layer, export: StateExport) -> None:
    cache, alone = random_cache(layer), random_cache(layer)
    y = step(layer, X, cache, lens=LENS, units=SEQUENCES, exports=EXPORTS)
    place = 2 + export.segment
    start, unit = sum(LENS[:place]), SEQUENCES[place]
    cut, end = start + export.offset, start + LENS[place]
    step(layer, X[start:cut], alone, lens=[export.offset], units=[unit])
    assert_unit(cache, export.unit, alone, unit)
    rest = step(layer, X[cut:end], cache, lens=[end - cut], units=[export.unit])
    torch.testing.assert_close(rest, y[cut:end], rtol=2e-5, atol=2e-5)


def test_exports_touch_their_units_only(layer: Layer) -> None:
    cache, plain, before = (random_cache(layer) for _ in range(3))
    y = step(layer, X, cache, lens=LENS, units=SEQUENCES, exports=EXPORTS)
    expected = step(layer, X, plain, lens=LENS, units=SEQUENCES)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    for unit in SEQUENCES:
        assert_unit(cache, unit, plain, unit)
    others = sorted({*range(UNITS)} - {*SEQUENCES} - {export.unit for export in EXPORTS})
    for part, as_before in zip(cache.parts, before.parts, strict=True):
        assert torch.equal(part[others], as_before[others])
