"""The identity of a model: every field of a config and every byte of the weights that counts."""

import dataclasses
import enum
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.families.registry import config_of
from engine.model_configs.attention import AttentionConfig, LatentAttentionConfig
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, MLPConfig, RouterConfig
from engine.model_configs.identity import NOT_COUNTED, ModelIdentity, identity_of
from engine.model_configs.model_config import Block, ModelConfig, PartConfig
from engine.model_configs.quantization import Float8Config
from engine.model_configs.recurrent import (
    GatedDeltaNetConfig,
    KimiDeltaAttentionConfig,
    LightningAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    ShortConvConfig,
)
from engine.model_configs.rope import (
    ChannelScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from tests.unit.engine.test_configs_hybrid import (
    BAMBA,
    FALCON_H1,
    GEMMA3,
    GRANITE,
    JAMBA,
    OLMO_HYBRID,
)
from tests.unit.engine.test_configs_kimi_linear import PUBLISHED as KIMI_LINEAR
from tests.unit.engine.test_configs_lfm2 import LFM2
from tests.unit.engine.test_configs_minimax import MINIMAX
from tests.unit.engine.test_configs_qwen import QWEN3, QWEN3_5

NEMOTRON_H = QWEN3 | {
    "hybrid_override_pattern": "M-*M",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
}
FILES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "NemotronHForCausalLM": NEMOTRON_H,
    "Gemma3ForCausalLM": GEMMA3,
    "GraniteMoeHybridForCausalLM": GRANITE,
    "FalconH1ForCausalLM": FALCON_H1,
    "BambaForCausalLM": BAMBA,
    "Lfm2ForCausalLM": LFM2,
    "MiniMaxForCausalLM": MINIMAX,
    "KimiLinearForCausalLM": KIMI_LINEAR | {"dtype": "float32"},
    "OlmoHybridForCausalLM": OLMO_HYBRID
    | {"dtype": None, "rope_parameters": None, "rope_theta": None},
    "JambaForCausalLM": JAMBA | {"torch_dtype": None},
}
NOT_ROTATED = ("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "KimiLinearForCausalLM")


def attention(scaling: RopeScaling | None) -> AttentionConfig:
    rope = RopeConfig(1e4, 8, scaling)
    return AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=rope)


ATTENTION = attention(None)
SCALED = tuple(
    attention(scaling)
    for scaling in (
        LinearScaling(4.0),
        YarnScaling(factor=4.0, original_positions=32),
        Llama3Scaling(factor=4.0, original_positions=32, low=1.0, high=4.0),
        ChannelScaling((1.0, 1.5, 2.0, 4.0)),
    )
)
MAMBA1 = Mamba1Config(
    inner_size=128, state_size=16, dt_rank=4, conv_kernel=4, conv_bias=True, proj_bias=False
)
MAMBA2 = Mamba2Config(
    num_heads=4,
    head_dim=8,
    state_size=16,
    n_groups=2,
    conv_kernel=4,
    conv_bias=True,
    in_proj_bias=False,
    out_proj_bias=False,
    time_step_limit=(0.0, float("inf")),
)
SHORT_CONV = ShortConvConfig(channels=64, conv_kernel=3)
LIGHTNING = LightningAttentionConfig(num_heads=4, head_dim=16)
DELTA_NET = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=8, conv_kernel=4)
KIMI_DELTA = KimiDeltaAttentionConfig(num_heads=2, head_dim=8, conv_kernel=4)
LATENT = LatentAttentionConfig(
    num_heads=4,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
    scale=0.4,
    norm_eps=1e-6,
)
SCALINGS = (LinearScaling, YarnScaling, Llama3Scaling, ChannelScaling)


def block(*parts: PartConfig, norm: str | None = "norm", post_norm: str | None = None) -> Block:
    named = tuple((type(part).__name__, part) for part in parts)
    return Block(norm=norm, parts=named, post_norm=post_norm)


MLP = MLPConfig(intermediate_size=96)
EXPERTS = ExpertsConfig(router=RouterConfig(count=4, top_k=2), intermediate_size=32)
EVERYTHING = ModelConfig(
    vocab_size=100,
    hidden_size=64,
    max_position_embeddings=400,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    dtype="float32",
    layers=(
        (block(ATTENTION), block(MLP, EXPERTS)),
        (block(MAMBA2, ATTENTION),),
        (block(MAMBA1),),
        (block(DELTA_NET), block(SHORT_CONV), block(LIGHTNING)),
        (block(KIMI_DELTA), block(LATENT)),
        (block(*SCALED),),
        (),
    ),
    renames=(("a", "b"),),
    quantization=Float8Config((128, 128)),
)
"""No family has all of it, but every class of config is in it."""


def parsed(architecture: str, dtype: str | None = None, /, **changes: Any) -> ModelIdentity:
    fields = {**FILES[architecture], "architectures": [architecture], **changes}
    return identity_of(config_of(ConfigReader(fields, "config.json"), dtype), "w", kernels="torch")


# --- every field of every class ------------------------------------------------------------------


def every_field(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields `Class.field` and the config with another value there, for fields at any depth."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for name, other in others(
            f"{type(config).__name__}.{field.name}", value, hints[field.name]
        ):
            yield name, dataclasses.replace(config, **{field.name: other})


def others(name: str, value: Any, hint: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        yield from every_field(value)
    elif name == "RopeConfig.scaling" and value is None:
        yield name, LinearScaling(2.0)
    elif name == "ModelConfig.layers":
        for layer, own in enumerate(value):
            for place, old in enumerate(own):
                for inner, new in every_part(old):
                    changed = (*own[:place], new, *own[place + 1 :])
                    yield inner, (*value[:layer], changed, *value[layer + 1 :])
    else:
        yield name, another(value, hint)


def every_part(old: Block) -> Iterator[tuple[str, Block]]:
    for place, (name, part) in enumerate(old.parts):
        for inner, other in every_field(part):
            parts = (*old.parts[:place], (name, other), *old.parts[place + 1 :])
            yield inner, dataclasses.replace(old, parts=parts)


def another(value: Any, hint: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return next(other for other in type(value) if other is not value)
    if isinstance(value, int | float):
        return value + 1 if value != value + 1 else 0.0
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (another(value[0], None), *value[1:])
    assert value is None, "a new type of field: say how it changes"
    kinds = get_args(hint) if get_origin(hint) is UnionType else ()
    return next(kind(1) for kind in kinds if kind in (int, float))


def test_every_field_of_a_config_counts_unless_it_is_listed() -> None:
    """A new field counts by itself; whoever adds one that does not says why in `NOT_COUNTED`."""
    before, seen = identity_of(EVERYTHING, "w", kernels="torch"), set()
    for name, config in every_field(EVERYTHING):
        seen.add(name)
        after = identity_of(config, "w", kernels="torch")
        assert (after.digest == before.digest) == (name in NOT_COUNTED), name
    kinds = (ModelConfig, MLPConfig, ExpertsConfig, RouterConfig, AttentionConfig, RopeConfig)
    states = (
        Mamba1Config,
        Mamba2Config,
        GatedDeltaNetConfig,
        ShortConvConfig,
        LightningAttentionConfig,
    )
    every = {
        f"{kind.__name__}.{field.name}"
        for kind in (
            *kinds,
            *SCALINGS,
            Float8Config,
            LatentAttentionConfig,
            *states,
            KimiDeltaAttentionConfig,
        )
        for field in dataclasses.fields(kind)
    }
    nested = {
        "ModelConfig.layers",
        "ModelConfig.quantization",
        "AttentionConfig.rope",
        "ExpertsConfig.router",
    }
    assert seen | nested == every
    assert NOT_COUNTED.keys() <= every
    assert all(NOT_COUNTED.values())


def test_order_and_number_of_layers_count() -> None:
    layers = EVERYTHING.layers
    others = (
        *(layers[::-1], layers[:-1], (*layers, ()), (*layers, layers[0][::-1])),
        # The same parts in other blocks, normed elsewhere, and added to something else.
        (*layers, (block(MLP, ATTENTION),)),
        (*layers, (block(MLP), block(ATTENTION))),
        (*layers, (block(MLP, ATTENTION, post_norm="norm"),)),
        (*layers, (dataclasses.replace(block(MLP, ATTENTION), normed_residual=1.0),)),
        (*layers, (dataclasses.replace(block(MLP, ATTENTION), normed_residual=2.0),)),
        (*layers, (block(MLP, ATTENTION, norm=None, post_norm="norm"),)),
    )
    found = {
        identity_of(dataclasses.replace(EVERYTHING, layers=other), "w", kernels="torch").digest
        for other in (layers, *others)
    }
    assert len(found) == 1 + len(others)
    rope = dataclasses.replace(ATTENTION, rope=None)
    two = ((block(ATTENTION), block(MLP)), (block(rope, MLP, post_norm="n"),))
    one = identity_of(dataclasses.replace(EVERYTHING, layers=two), "w", kernels="torch")
    assert one.fields["layers"] == "attention/mlp attention_2+mlp:norm"
    assert (one.fields["attention.rope.theta"], one.fields["attention_2.rope"]) == (
        "10000.0",
        "None",
    )


def test_weights_kernels_and_quantization_count() -> None:
    mine = identity_of(EVERYTHING, "w", kernels="torch").digest
    assert identity_of(EVERYTHING, "v", kernels="torch").digest != mine
    assert identity_of(EVERYTHING, "w", kernels="native").digest != mine
    assert identity_of(EVERYTHING, "w", kernels="torch", quantization="int8").digest != mine


def test_a_field_whose_text_may_differ_between_processes_is_refused() -> None:
    strange = dataclasses.replace(EVERYTHING, dtype={"a", "b"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="teach it"):
        identity_of(strange, "w", kernels="torch")


# --- config.json ---------------------------------------------------------------------------------

NO_RESULT = {
    "transformers_version": st.just("4.99.0"),
    "_name_or_path": st.text(max_size=8),
    "max_position_embeddings": st.integers(1, 1 << 20),
    "use_cache": st.booleans(),
    "eos_token_id": st.integers(0, 50),
    "pad_token_id": st.none(),
    "initializer_range": st.floats(0, 1),
    "torch_dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
    "tie_word_embeddings": st.booleans(),
    "unknown_field": st.integers(),
}


@pytest.mark.parametrize("architecture", FILES)
@given(changes=st.fixed_dictionaries({}, optional=NO_RESULT))
def test_what_changes_no_result_changes_no_identity(
    architecture: str, changes: dict[str, Any]
) -> None:
    """The type is given on the command line, so the file's does not count."""
    assert parsed(architecture, "float32", **changes) == parsed(architecture, "float32")


@pytest.mark.parametrize("architecture", FILES)
def test_what_changes_results_changes_the_identity(architecture: str) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"norm_eps" if architecture == "Lfm2ForCausalLM" else "rms_norm_eps": 1e-3},
        {"dtype": "bfloat16"},
        {"intermediate_size": 512},
        {"vocab_size": 101},
    ]
    if architecture == "Gemma3ForCausalLM":
        changes += [{"sliding_window": 8}, {"query_pre_attn_scalar": 4}]
        changes += [{"rope_local_base_freq": 100.0}]
    elif architecture == "JambaForCausalLM":
        changes += [{"num_experts_per_tok": 3}, {"attn_layer_offset": 1}, {"mamba_dt_rank": 5}]
    elif architecture not in NOT_ROTATED:
        changes += [{"rope_theta": 100.0}, {"rope_parameters": {"rope_theta": 5.0}}]
    if architecture == "GraniteMoeHybridForCausalLM":
        changes = [it for it in changes if "intermediate_size" not in it]  # of experts, here none
        changes += [{"residual_multiplier": 0.5}, {"position_embedding_type": "rope"}]
    digests = {parsed(architecture, **it).digest for it in changes}
    assert len(digests) == len(changes)


def test_a_device_is_no_part_of_a_model_but_the_type_that_it_computes_in_is() -> None:
    def on(device: str, dtype: str) -> ModelIdentity:
        fields = {**QWEN3_5, "architectures": ["Qwen3_5ForCausalLM"], "torch_dtype": dtype}
        config = config_of(ConfigReader(fields, "config.json"), "auto", device=device)
        return identity_of(config, "w", kernels="torch")

    assert on("cpu", "bfloat16") == on("cuda", "bfloat16")
    both = on("cpu", "float16").fields["dtype"], on("cuda", "float16").fields["dtype"]
    assert both == ("float32", "float16")


def test_defaults_written_out_are_those_left_out() -> None:
    left_out = parsed("Qwen3_5ForCausalLM")
    written = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4}
    assert parsed("Qwen3_5ForCausalLM", **written) == left_out
    rope = {"rope_theta": 10000, "rope_type": "default", "partial_rotary_factor": 0.25}
    assert parsed("Qwen3_5ForCausalLM", rope_parameters=rope) == left_out
