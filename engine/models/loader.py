"""From a folder and its config to a model that runs. Knows no family by name."""

import time
from pathlib import Path

import structlog
import torch

from engine.forward import TORCH_DTYPES
from engine.layers.weights import Weights
from engine.model_configs.identity import ModelIdentity, identity_of
from engine.model_configs.model_config import ModelConfig
from engine.models.registry import FAMILIES, CausalLM
from engine.models.weights_digest import WeightsDigest

log = structlog.get_logger()


def load_and_identify(
    folder: Path, config: ModelConfig, device: torch.device
) -> tuple[CausalLM, ModelIdentity]:
    """As `load_model`, and the model's identity, whose digest is computed meanwhile."""
    with WeightsDigest(folder) as digest:
        model = load_model(folder, config, device)
        identity = identity_of(config, digest.result())
    log.info("the model is known", identity=identity.digest)
    return model, identity


def load_model(folder: Path, config: ModelConfig, device: torch.device) -> CausalLM:
    """The model in `folder` as `config` (from `read_config`) describes it, on `device`.

    Raises CheckpointError for tensors that are missing, misshapen or not part of the architecture.
    """
    family, start = FAMILIES[config.family], time.monotonic()
    log.info("loading the model", folder=str(folder), dtype=config.dtype)
    with Weights(folder, TORCH_DTYPES[config.dtype], device, rename=family.rename) as weights:
        model = family.build(config, weights)
        weights.finish()
    log.info("the model is loaded", seconds=round(time.monotonic() - start, 1))
    return model
