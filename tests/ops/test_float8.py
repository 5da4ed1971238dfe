"""Checkpoints in 8-bit floats load as their weights multiplied out by hand, or say why not."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.support.small_models import configs, widen
from engine.errors import CheckpointError
from engine.families.registry import read_config
from engine.model_configs.quantization import Float8Config
from engine.models.loader import load_and_identify
from engine.weights.float8 import Scales
from tests.support.nodes.oracle import Runner, load

E4M3_MAX = 448.0
TOKENS = list(range(3, 60))
Layout = tuple[int, int] | str
"""A block, or "tensor", "expert" or "row"."""
SUFFIX = {"fp8": "_scale_inv", "compressed-tensors": "_scale", "modelopt": "_scale"}


def groups_of(weight: Tensor, layout: Layout) -> Tensor:
    """For each element the number of its scale, from the definition: int64 of weight's shape."""
    shape = (1, *weight.shape)[-3:]
    experts, rows, columns = (torch.arange(size) for size in shape)
    one_each = experts[:, None, None], rows[None, :, None], columns[None, None, :]
    numbers: Tensor
    if isinstance(layout, tuple):
        down, across = (-(-size // block) for size, block in zip(shape[1:], layout, strict=True))
        in_row = one_each[1] // layout[0] * across + one_each[2] // layout[1]
        numbers = one_each[0] * down * across + in_row
    elif layout == "tensor":
        numbers = torch.zeros(shape, dtype=torch.int64)
    elif layout == "expert":
        numbers = one_each[0].expand(shape)
    else:
        numbers = (one_each[0] * shape[1] + one_each[1]).expand(shape)
    return numbers.view(weight.shape) if weight.dim() == 3 else numbers[0]


def scale_shape(weight: Tensor, layout: Layout) -> tuple[int, ...]:
    leading, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    if isinstance(layout, tuple):
        return (*leading, -(-rows // layout[0]), -(-columns // layout[1]))
    shapes = {"tensor": (), "expert": leading, "row": (*leading, rows, 1)}
    return shapes[layout]


def quantize(
    weight: Tensor, layout: Layout, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """8-bit floats, their scales, and the product of both in float32."""
    numbers = groups_of(weight, layout)
    largest = torch.zeros(int(numbers.max()) + 1)
    largest.scatter_reduce_(0, numbers.flatten(), weight.abs().float().flatten(), "amax")
    scales = (largest.clamp_min(1e-6) / E4M3_MAX).to(scale_dtype)
    wide = scales.float()[numbers]
    stored = (weight / wide).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return stored, scales.reshape(scale_shape(weight, layout)), stored.float() * wide


# --- one tensor ----------------------------------------------------------------------------------

SIZES = st.integers(1, 40)
LAYOUTS = st.one_of(st.sampled_from(["tensor", "expert", "row"]), st.tuples(SIZES, SIZES))


@given(
    shape=st.one_of(st.tuples(SIZES, SIZES), st.tuples(st.integers(1, 4), SIZES, SIZES)),
    layout=LAYOUTS,
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e8m0fnu]),
    tall=st.booleans(),
)
def test_every_element_is_multiplied_by_its_scale(
    shape: tuple[int, ...], layout: Layout, scale_dtype: torch.dtype, tall: bool
) -> None:
    if tall:  # more rows than are multiplied at a time
        shape = (*shape[:-2], shape[-2] + 1500, 2)
    if layout == "expert" and len(shape) == 2:
        layout = "tensor"
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    stored, scale, expected = quantize(weight, layout, scale_dtype)
    scales = Scales(Float8Config(layout if isinstance(layout, tuple) else None), ["w", "w_scale"])
    assert scales.of("w", stored.dtype) == "w_scale"
    out = torch.empty(shape)
    scales.multiply(("w", stored), scale, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("stored_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_8_bit_float_is_itself(stored_dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(stored_dtype).view(16, 16)
    out = torch.empty(16, 16)
    Scales(Float8Config(), ["w", "w_scale"]).multiply(("w", every), torch.ones(()), out)
    expected = every.float()
    finite = expected.isfinite()
    assert torch.equal(out[finite], expected[finite])


# --- whole folders -------------------------------------------------------------------------------


def save_model(folder: Path, family: str) -> dict[str, Tensor]:
    """A random model in float32, as published: its config and tensors."""
    folder.mkdir()
    widen(AutoModelForCausalLM.from_config(configs(256)[family]), 3).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def is_matrix(name: str, weight: Tensor) -> bool:
    kept = ("embed", "lm_head", "conv1d", "router", "gate.weight", "norm")
    return weight.dim() > 1 and not any(word in name for word in kept)


def compressed(strategy: str, **own: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **own}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


BLOCK = (24, 40)  # divides neither
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
PUBLISHED: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "fp8-block": ("qwen3", BLOCK, FP8 | {"weight_block_size": [24, 40], "scale_fmt": "ue8m0"}),
    "fp8-tensor": ("qwen3", "tensor", FP8 | {"activation_scheme": "static"}),
    "fp8-experts": ("granitemoehybrid", BLOCK, FP8 | {"weight_block_size": [24, 40]}),
    "compressed-tensor": ("nemotron_h", "tensor", compressed("tensor")),
    "compressed-channel": ("granitemoehybrid", "row", compressed("channel")),
    "compressed-block": ("qwen3", BLOCK, compressed("block", block_structure=[24, 40])),
    "modelopt": ("qwen3", "tensor", {"quant_method": "modelopt", **MODELOPT}),
}


def write(folder: Path, stored: Mapping[str, Tensor], layout: Layout, method: str) -> None:
    """Replaces the tensors of `folder` by 8-bit floats, with unused scales beside them."""
    tensors = dict(stored)
    for name, weight in stored.items():
        if is_matrix(name, weight):
            tensors[name], tensors[f"{name}{SUFFIX[method]}"], _ = quantize(weight, layout)
    layer = "model.layers.1.self_attn"
    for name in ("q_proj.input_scale", "k_proj.k_scale", "v_proj.output_scale", "v_scale"):
        tensors[f"{layer}.{name}"] = torch.ones(())
    save_file(tensors, folder / "model.safetensors")


def logits(folder: Path, dtype: str | None = None) -> Tensor:
    config, model = load(folder, dtype)
    return Runner(config, model).step({}, {0: TOKENS})[0]


def digest_of(folder: Path) -> str:
    return load_and_identify(folder, read_config(folder), torch.device("cpu"))[1].digest


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float32") for case in PUBLISHED), ("fp8-block", "bfloat16")]
)
def test_a_published_folder_is_its_weights_multiplied_out(
    tmp_path: Path, case: str, dtype: str
) -> None:
    family, layout, settings = PUBLISHED[case]
    by_hand, folder = tmp_path / "by-hand", tmp_path / "float8"
    tensors = save_model(by_hand, family)
    save_model(folder, family)
    change_config(folder, quantization_config=settings)
    write(folder, tensors, layout, settings["quant_method"])
    quantized = {name: it for name, it in tensors.items() if is_matrix(name, it)}
    tensors |= {name: quantize(it, layout)[2] for name, it in quantized.items()}
    save_file(tensors, by_hand / "model.safetensors")
    with capture_logs() as logs:
        found = logits(folder, dtype)
    assert torch.equal(found, logits(by_hand, dtype))
    (line,) = (line for line in logs if "activations are not quantized" in line["event"])
    assert (line["tensors"], line["dtype"]) == (len(quantized), dtype)
    (line,) = (line for line in logs if "not used" in line["event"])
    assert sum(line["bytes"].values()) == 4 * 4


def test_settings_may_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, save_model(folder, "qwen3"), "tensor", "modelopt")
    with pytest.raises(CheckpointError, match="has no 'quantization_config'"):
        load(folder)
    own = {"producer": {"name": "modelopt"}, "quantization": MODELOPT}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    beside = logits(folder)
    (folder / "hf_quant_config.json").unlink()
    change_config(folder, quantization_config={"quant_method": "modelopt", **MODELOPT})
    assert torch.equal(beside, logits(folder))


def test_a_float8_checkpoint_and_its_original_are_two_models(tmp_path: Path) -> None:
    original, *copies = (tmp_path / name for name in ("original", "p", "d"))
    tensors = save_model(original, "qwen3")
    for folder in copies:
        save_model(folder, "qwen3")
        change_config(folder, quantization_config=FP8)
        write(folder, tensors, "tensor", "fp8")
    p, d = map(digest_of, copies)
    assert p == d != digest_of(original)


QUERY = "model.layers.1.self_attn.q_proj.weight"
QUERY_SCALE = f"{QUERY}_scale_inv"
DAMAGES: dict[str, tuple[Callable[[Tensor, Tensor], dict[str, Tensor | None]], str]] = {
    "no-scale": (lambda weight, scale: {QUERY_SCALE: None}, rf"{QUERY}.*float8.* no scale"),
    "wrong-shape": (
        lambda weight, scale: {QUERY_SCALE: scale[:-1].clone()},
        rf"{QUERY_SCALE}' has shape \(5, 2\).*{QUERY}.*\(6, 2\) for blocks of 24 x 40",
    ),
    "no-blocks": (
        lambda weight, scale: {QUERY_SCALE: torch.ones(())},
        rf"{QUERY_SCALE}' has shape \(\)",
    ),
    "scale-type": (
        lambda weight, scale: {QUERY_SCALE: scale.to(torch.int32)},
        rf"{QUERY_SCALE}' has type torch.int32",
    ),
    "plain-weight": (
        lambda weight, scale: {QUERY: weight.to(torch.bfloat16)},
        rf"{QUERY}.*bfloat16 and a scale '{QUERY_SCALE}'",
    ),
    "integers": (
        lambda weight, scale: {
            QUERY: torch.ones(weight.shape, dtype=torch.int8),
            QUERY_SCALE: None,
        },
        rf"{QUERY}.*int8: use the checkpoint in bfloat16",
    ),
    "no-weight": (
        lambda weight, scale: {"model.layers.1.other.weight_scale": scale.clone()},
        r"not part of this architecture: model\.layers\.1\.other\.weight_scale",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_wrong_scales_are_named(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "model"
    write(folder, save_model(folder, "qwen3"), BLOCK, "fp8")
    change_config(folder, quantization_config=FP8 | {"weight_block_size": list(BLOCK)})
    tensors = load_file(folder / "model.safetensors")
    damage, message = DAMAGES[case]
    changed = tensors | damage(tensors[QUERY], tensors[QUERY_SCALE])
    kept = {name: it for name, it in changed.items() if it is not None}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(folder)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("'gptq'", {"quant_method": "gptq", "bits": 4}),
    ("'bitsandbytes'", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    ("'pack-quantized'", compressed("channel") | {"format": "pack-quantized"}),
    ("8, 'int'", compressed("channel", type="int")),
    ("'group'", compressed("group", group_size=128)),
    ("symmetric", compressed("channel", symmetric=False)),
    ("sparse-24", compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}),
    ("transform_config", compressed("channel") | {"transform_config": {"config_groups": {}}}),
    ("'NVFP4'", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    ("'W4A8_AWQ'", {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ"}}),
]


@pytest.mark.parametrize(("named", "settings"), REFUSED, ids=[named for named, _ in REFUSED])
def test_other_quantizations_are_refused_by_name(
    tmp_path: Path, named: str, settings: dict[str, Any]
) -> None:
    configs(256)["qwen3"].save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["Qwen3ForCausalLM"], quantization_config=settings)
    with pytest.raises(CheckpointError, match="use the checkpoint in bfloat16") as error:
        read_config(tmp_path)
    assert named in str(error.value)


@pytest.mark.parametrize("sizes", [[128], [128, 0], [128, "128"], [True, 128]], ids=str)
def test_blocks_are_rows_and_columns(tmp_path: Path, sizes: list[Any]) -> None:
    configs(256)["qwen3"].save_pretrained(tmp_path)
    settings = FP8 | {"weight_block_size": sizes}
    change_config(tmp_path, architectures=["Qwen3ForCausalLM"], quantization_config=settings)
    with pytest.raises(CheckpointError, match="weight_block_size"):
        read_config(tmp_path)
