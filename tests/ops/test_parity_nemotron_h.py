"""Nemotron-H against transformers in float32: same files, same logits, same greedy tokens."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

from tests.ops.parity import VOCAB, Case, Pair, ParityTests
from tests.support.nodes.oracle import Runner, load, reference_logits

# transformers 5.23 clamps dt from below at `time_step_min` in prefill only, and ignores
# `time_step_limit`; the models' original code, and ours, follow `time_step_limit`. So: tiny.
COMMON = {
    "vocab_size": VOCAB,
    "intermediate_size": 80,
    "time_step_min": 1e-9,
    "eos_token_id": None,
    "num_logits_to_keep": 1,
}
BIASES = {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "conv_kernel": 3}

# Shares of nine experts in three groups, and of seven in a latent space; stored one by one.
EXPERTS = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
LATENT = EXPERTS | {
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "moe_latent_size": 32,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}


class Tied(NemotronHForCausalLM):  # type: ignore[misc]
    """transformers 5.23 does not tie Nemotron-H by itself, even when its config asks."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embeddings.weight"}


def config_of(
    pattern: str,
    hidden: int,
    attention: tuple[int, ...],
    *,
    mamba: tuple[int, ...],
    **changes: Any,
) -> NemotronHConfig:
    """attention = (heads, kv heads, head dim), mamba = (heads, head dim, groups, state size)."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    mamba_names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
    fields = COMMON | {"hybrid_override_pattern": pattern, "hidden_size": hidden}
    fields |= dict(zip(names, attention, strict=True)) | changes
    return NemotronHConfig(**fields, **dict(zip(mamba_names, mamba, strict=True)))


groups = partial(config_of, "M-M*M-", 64, (4, 2, 16), mamba=(4, 16, 2, 16))


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


named_as_on_the_hub = partial(rewrite, changes={"architectures": ["NemotronHForCausalLM"]})


class TestNemotronH(ParityTests):
    LONG: ClassVar = ("groups", "odd-sizes")
    CASES: ClassVar = {
        "groups": Case(groups()),
        "odd-sizes": Case(config_of("MM*-M*", 48, (3, 1, 20), mamba=(6, 8, 1, 24)), seed=21),
        "tied-many-groups": Case(
            config_of("-M*MM-", 64, (4, 4, 16), mamba=(8, 8, 4, 8), tie_word_embeddings=True),
            named_as_on_the_hub,
            Tied,
        ),
        "residual-in-float32": Case(
            config_of("M*-M", 32, (2, 2, 16), mamba=(2, 16, 1, 8), residual_in_fp32=True), seed=6
        ),
        "biases": Case(
            config_of("*MM-", 32, (2, 1, 16), mamba=(4, 8, 1, 16), **BIASES), seed=29, embed=1.0
        ),
        "experts": Case(config_of("ME*E-M", 64, (4, 2, 16), mamba=(4, 16, 2, 16), **EXPERTS)),
        "latent-experts": Case(
            config_of("M*EME", 48, (3, 1, 16), mamba=(6, 8, 1, 24), **LATENT), named_as_on_the_hub
        ),
    }

    @pytest.mark.parametrize("aligned", [False, True])
    def test_bfloat16_states_lose_only_rounding(
        self, pair: Pair, tmp_path: Path, aligned: bool
    ) -> None:
        shutil.copytree(pair.folder, tmp_path, dirs_exist_ok=True)
        rewrite(tmp_path, {"mamba_ssm_cache_dtype": "bfloat16"})
        runner = Runner(*load(tmp_path), aligned=aligned)
        parts = [runner.step({}, {0: pair.tokens[:100]})[0]]
        parts += [runner.step({0: token})[0] for token in pair.tokens[100:150]]
        error = (torch.cat(parts) - pair.logits[:150]).abs()
        assert 0.0 < error.mean() < 0.02


def test_time_steps_stay_within_the_configured_limit(tmp_path: Path) -> None:
    """transformers ignores the limit in this family but clamps from below by `time_step_min`."""
    theirs = Case(groups(time_step_min=0.5)).build()
    theirs.save_pretrained(tmp_path)
    rewrite(tmp_path, {"time_step_limit": [0.5, float("inf")]})
    prompt = list(range(VOCAB))
    runner = Runner(*load(tmp_path))
    parts = [runner.step({}, {0: prompt[:50]})[0]]
    parts += [runner.step({0: token})[0] for token in prompt[50:]]
    torch.testing.assert_close(
        torch.cat(parts), reference_logits(theirs, prompt), atol=3e-4, rtol=0.0
    )
