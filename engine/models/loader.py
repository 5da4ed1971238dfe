"""From a folder and its config to a model that runs."""

import threading
import time
from pathlib import Path
from typing import Protocol

import structlog
import torch
from torch import Tensor

from engine.compute_config import DEFAULTS, ComputeConfig
from engine.forward import TORCH_DTYPES, ForwardBatch, LayerCaches
from engine.model_configs.identity import ModelIdentity, identity_of
from engine.model_configs.model_config import ModelConfig
from engine.models.hybrid import build
from engine.ops.backend import Ops, Recorder, ops_for
from engine.weights.digest import WeightsDigest
from engine.weights.files import WeightFiles
from engine.weights.weights import Weights


class CausalLM(Protocol):
    """A model of any family. `recorder`: that of its column of operators, or None."""

    @property
    def recorder(self) -> Recorder | None: ...

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [tokens, hidden] of the batch; writes K/V and states into `caches`."""

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """float32 logits [rows, vocab] of some rows of hidden states."""


log = structlog.get_logger()


def load_and_identify(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    *,
    compute: ComputeConfig = DEFAULTS,
    stop: threading.Event | None = None,
) -> tuple[CausalLM, ModelIdentity]:
    """As `load_model`, and the model's identity, from the same bytes. `stop`, once set, ends it."""
    started = time.monotonic()
    ops = _ops(config, device, compute)
    log.info("loading the model", folder=str(folder), dtype=config.dtype, kernels=ops.name)
    if compute.quantization is not None:
        log.info(
            "matrices of linear layers and the output head are quantized; those of experts, "
            "routers, convolutions and embeddings are not",
            quantization=compute.quantization,
        )
    with WeightFiles(folder, stop) as files:
        digest = WeightsDigest(files)
        model = _build(files, config, device, ops)
        identity = identity_of(
            config, digest.result(), kernels=ops.name, quantization=compute.quantization
        )
    seconds = round(time.monotonic() - started, 1)
    log.info("the model is loaded", seconds=seconds, identity=identity.digest)
    return model, identity


def load_model(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    *,
    compute: ComputeConfig = DEFAULTS,
) -> CausalLM:
    """The model in `folder` as `config` (from `read_config`) describes it, on `device`.

    Raises CheckpointError for tensors that are missing, misshapen or not part of the architecture,
    and for files that cannot be read.
    """
    with WeightFiles(folder) as files:
        return _build(files, config, device, _ops(config, device, compute))


def _ops(config: ModelConfig, device: torch.device, compute: ComputeConfig) -> Ops:
    return ops_for(
        device,
        TORCH_DTYPES[config.dtype],
        kernels=compute.kernels,
        quantization=compute.quantization,
    )


def _build(files: WeightFiles, config: ModelConfig, device: torch.device, ops: Ops) -> CausalLM:
    weights = Weights(
        files,
        TORCH_DTYPES[config.dtype],
        device,
        ops=ops,
        renames=config.renames,
        quantization=config.quantization,
    )
    model = build(config, weights)
    weights.finish()
    return model
