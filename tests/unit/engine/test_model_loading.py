"""From a model folder to a model: what loads, and that a broken folder's culprit is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.families.registry import read_config
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, StatePart
from engine.model_configs.attention import AttentionConfig
from engine.model_configs.recurrent import Mamba2Config
from engine.models.hybrid import HybridModel
from engine.models.loader import load_model
from engine.ops.backend import torch_ops
from engine.weights.digest import WeightsDigest
from engine.weights.files import WeightFiles
from engine.weights.weights import Weights

CPU = torch.device("cpu")

# As on the hub: pattern string, older key names, a bare Infinity.
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_head_dim": 12,
    "conv_kernel": 4,
    "eos_token_id": 3,
    "hidden_size": 16,
    "hybrid_override_pattern": "M-*M",
    "intermediate_size": 24,
    "mamba_head_dim": 4,
    "mamba_num_heads": 4,
    "n_groups": 2,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "ssm_state_size": 8,
    "time_step_limit": [0.0, float("inf")],
    "torch_dtype": "float32",
    "vocab_size": 32,
}
# The same model as transformers 5 saves it.
RENAMED = ("attention_head_dim", "hybrid_override_pattern", "num_hidden_layers", "rms_norm_eps")
SAVED_CONFIG: dict[str, Any] = {
    **{key: value for key, value in HUB_CONFIG.items() if key not in (*RENAMED, "torch_dtype")},
    "dtype": "float32",
    "head_dim": 12,
    "layer_norm_epsilon": 1e-6,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
}


def tensors() -> dict[str, Tensor]:
    """Everything that HUB_CONFIG asks for, by its name on the hub."""
    draw = torch.Generator().manual_seed(0)
    mamba: dict[str, tuple[int, ...]] = {
        "A_log": (4,),
        "D": (4,),
        "conv1d.bias": (48,),
        "conv1d.weight": (48, 1, 4),
        "dt_bias": (4,),
        "in_proj.weight": (68, 16),
        "norm.weight": (16,),
        "out_proj.weight": (16, 16),
    }
    mlp: dict[str, tuple[int, ...]] = {"up_proj.weight": (24, 16), "down_proj.weight": (16, 24)}
    attention: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (24, 16),
        "k_proj.weight": (12, 16),
        "v_proj.weight": (12, 16),
        "o_proj.weight": (16, 24),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (32, 16),
        "backbone.norm_f.weight": (16,),
        "lm_head.weight": (32, 16),
    }
    for layer, mixer in enumerate((mamba, mlp, attention, mamba)):
        shapes[f"backbone.layers.{layer}.norm.weight"] = (16,)
        for name, shape in mixer.items():
            shapes[f"backbone.layers.{layer}.mixer.{name}"] = shape
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def write_config(folder: Path, config: dict[str, Any], **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config | changes))


def write_shards(folder: Path, stored: dict[str, Tensor]) -> None:
    names = sorted(stored)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: stored[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path, HUB_CONFIG)
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def load(folder: Path, dtype: str | None = None) -> HybridModel:
    model = load_model(folder, read_config(folder, dtype), CPU)
    assert isinstance(model, HybridModel)
    return model


def logits_of(model: HybridModel) -> Tensor:
    """Enough to tell whether the same head and embeddings were read; needs no cache."""
    return model.logits(model.embeddings(torch.arange(32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_file_dtypes_are_converted_to_the_compute_dtype(folder: Path, dtype: torch.dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    save_file(stored, folder / "model.safetensors")
    model = load(folder, "float32")
    table = stored["backbone.embeddings.weight"].float()
    head = stored["lm_head.weight"].float()
    assert model.embeddings.weight.dtype is torch.float32
    torch.testing.assert_close(logits_of(model), table @ head.t())


def test_compute_dtype_can_be_narrower_than_the_file(folder: Path) -> None:
    model = load(folder, "bfloat16")
    assert model.embeddings.weight.dtype is torch.bfloat16
    assert logits_of(model).dtype is torch.float32


def test_shards_equal_a_single_file(folder: Path) -> None:
    single = logits_of(load(folder))
    (folder / "model.safetensors").unlink()
    write_shards(folder, tensors())
    assert torch.equal(logits_of(load(folder)), single)


def test_names_of_either_spelling_load(folder: Path) -> None:
    single = logits_of(load(folder))
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in tensors().items()}
    save_file(renamed, folder / "model.safetensors")
    assert torch.equal(logits_of(load(folder)), single)


def test_prediction_heads_are_skipped_and_tied_heads_come_from_the_embeddings(folder: Path) -> None:
    write_config(folder, HUB_CONFIG, tie_word_embeddings=True)
    stored = tensors() | {"mtp.layers.0.norm.weight": torch.ones(16)}
    del stored["lm_head.weight"]
    save_file(stored, folder / "model.safetensors")
    table = stored["backbone.embeddings.weight"]
    torch.testing.assert_close(logits_of(load(folder)), table @ table.t())


def test_both_spellings_of_the_config_mean_the_same(tmp_path: Path) -> None:
    write_config(tmp_path, HUB_CONFIG)
    hub = read_config(tmp_path)
    write_config(tmp_path, SAVED_CONFIG)
    assert read_config(tmp_path) == hub
    (mamba,), mlp, (attention,), (last,) = hub.mixers
    assert isinstance(mamba, Mamba2Config)
    assert isinstance(attention, AttentionConfig)
    assert (mlp, last) == ((), mamba)
    assert attention.head_dim == 12
    assert hub.rms_norm_eps == 1e-6
    assert mamba.time_step_limit == (0.0, float("inf"))


def test_layers_keep_what_the_config_says(tmp_path: Path) -> None:
    write_config(tmp_path, HUB_CONFIG, mamba_ssm_cache_dtype="float16")
    config = read_config(tmp_path, "bfloat16")
    state = MambaSpec("mamba2", (StatePart((3, 48), "bfloat16"), StatePart((4, 4, 8), "float16")))
    assert [group.spec for group in config.groups] == [state, FullAttentionSpec(1, 12, "bfloat16")]
    assert [group.layers for group in config.groups] == [(0, 3), (2,)]


def test_state_is_float32_by_default(tmp_path: Path) -> None:
    write_config(tmp_path, HUB_CONFIG)
    wide, narrow = read_config(tmp_path), read_config(tmp_path, "bfloat16")
    assert isinstance(wide.groups[0].spec, MambaSpec)
    conv, temporal = wide.groups[0].spec.parts
    parts = (replace(conv, dtype="bfloat16"), temporal)
    assert narrow.groups[0].spec == replace(wide.groups[0].spec, parts=parts)


EXPERTS: dict[str, Any] = {
    "hybrid_override_pattern": "M-E*",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16,
}
BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "experts": (EXPERTS | {"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9 of 8"),
    "groups-of-experts": (
        EXPERTS | {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
        "3 experts out of 'topk_group' 1 of 'n_group' 4 groups of 2",
    ),
    "biased-experts": (EXPERTS | {"mlp_bias": True}, "mlp_bias"),
    "unknown-layer": ({"hybrid_override_pattern": "M-?*"}, r"layer 2 is '\?'"),
    "layer-count": ({"num_hidden_layers": 5}, "'num_hidden_layers' is 5, but 4"),
    "no-layers": ({"hybrid_override_pattern": None}, "hybrid_override_pattern"),
    "groups": ({"n_groups": 3}, r"'n_groups' 3 .*'mamba_num_heads' 4"),
    "zero-heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "limit": ({"time_step_limit": [0.0]}, "time_step_limit"),
    "limit-type": ({"time_step_limit": [0.0, "wide"]}, "time_step_limit.*wide"),
    "activation": ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act.*gelu"),
    "state-dtype": ({"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype.*int8"),
    "dtype": ({"torch_dtype": "float64"}, "float64"),
    "missing": ({"hidden_size": None}, "hidden_size"),
    "mistyped": ({"hidden_size": "16"}, "hidden_size.*'16'"),
    "quantized": (
        {"quantization_config": {"quant_method": "mxfp4"}},
        "'mxfp4' is not supp.*bfloat16",
    ),
    "architecture": (
        {"architectures": ["LlamaForCausalLM"]},
        r"LlamaForCausalLM.*NemotronHForCausalLM, .*Qwen3ForCausalLM",
    ),
    "architecture-type": ({"architectures": [[]]}, "architectures"),
    "no-architecture": ({"architectures": None}, "architectures"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_values_are_named(tmp_path: Path, case: str) -> None:
    changes, message = BAD_CONFIGS[case]
    write_config(tmp_path, HUB_CONFIG, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "config.json is not JSON"), ("[1]", "config.json holds a list")],
)
def test_broken_config_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)


def drop(stored: dict[str, Tensor]) -> None:
    del stored["backbone.layers.3.mixer.dt_bias"]


def add(stored: dict[str, Tensor]) -> None:
    stored["backbone.layers.1.mixer.gate_proj.weight"] = torch.ones(24, 16)


def reshape(stored: dict[str, Tensor]) -> None:
    stored["backbone.layers.2.mixer.k_proj.weight"] = torch.ones(16, 16)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, r"no tensor 'model\.layers\.3\.mixer\.dt_bias'"),
        (add, r"1 tensors .*backbone\.layers\.1\.mixer\.gate_proj\.weight"),
        (reshape, r"layers\.2\.mixer\.k_proj\.weight' has shape \(16, 16\).*\(12, 16\)"),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_wrong_tensors_are_named(
    folder: Path, damage: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    stored = tensors()
    damage(stored)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_tensors_are_joined_whatever_rows_each_has(tmp_path: Path) -> None:
    whole = torch.randn(8, 1, 4)
    q, k = (part.clone() for part in whole.split_with_sizes([3, 5]))
    save_file({"q": q, "k": k}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        weights = Weights(files, torch.float32, CPU, ops=torch_ops(), renames=())
        assert torch.equal(weights.take_joined(["q", "k"], (8, 1, 4)), whole)
        for shape in ((9, 1, 4), (8, 1, 3)):
            with pytest.raises(CheckpointError, match=r"'q' has shape \(3, 1, 4\).* 8 rows"):
                weights.take_joined(["q", "k"], shape)


def test_two_spellings_of_one_tensor_are_named(folder: Path) -> None:
    """Neither may win in silence: nobody can say which one the model was saved with."""
    stored = tensors()
    stored["model.norm.weight"] = torch.ones(16)
    save_file(stored, folder / "model.safetensors")
    message = r"'backbone\.norm_f\.weight' and 'model\.norm\.weight' are both"
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(folder)


def weights_digest(folder: Path) -> str:
    with WeightFiles(folder) as files:
        return WeightsDigest(files).result()


def test_weights_that_cannot_be_read_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    for read in (load, weights_digest):
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            read(folder)
    (folder / "model.safetensors.index.json").symlink_to("model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read: Too many levels"):
        load(folder)


def test_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    write_shards(folder, tensors())
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors cannot be read"):
        load(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_shard_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    index = {"weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"outside the folder: '{name}'"):
        load(folder)


BROKEN_INDEXES = (
    *("", "{", "{}", "[]", "null", "7", '"weight_map"'),
    *('{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["b"]}}'),
)


@pytest.mark.parametrize("text", BROKEN_INDEXES)
def test_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json has no weight_map"):
        load(folder)


def save_only(folder: Path, stored: dict[str, Tensor], **config: object) -> None:
    fields = {key: it for key, it in HUB_CONFIG.items() if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(fields | config))
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("named", "stored", "on_cpu", "on_device"),
    [
        ("bfloat16", torch.bfloat16, "bfloat16", "bfloat16"),
        ("float16", torch.float16, "float32", "float16"),
        ("float32", torch.float32, "float32", "float32"),
        ("bfloat16", torch.float8_e4m3fn, "bfloat16", "bfloat16"),
        ("float8_e4m3fn", torch.float8_e4m3fn, "bfloat16", "bfloat16"),
        (None, torch.bfloat16, "float32", "bfloat16"),
        (None, torch.float16, "float32", "float16"),
        (None, torch.float8_e5m2, "float32", "bfloat16"),
        (None, torch.float32, "float32", "float32"),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_is_the_dtype_of_the_checkpoint(
    tmp_path: Path, key: str, named: str | None, stored: torch.dtype, on_cpu: str, on_device: str
) -> None:
    """Most numbers count: norms and decays are float32 in models of 16 bits."""
    tensors = {"w": torch.zeros(8, 8).to(stored), **{f"norm{n}": torch.ones(8) for n in range(3)}}
    save_only(tmp_path, tensors, **{key: named})
    for device, expected in (("cpu", on_cpu), ("cuda", on_device), ("cuda:1", on_device)):
        assert read_config(tmp_path, "auto", device=device).dtype == expected
        assert read_config(tmp_path, "float16", device=device).dtype == "float16"
