"""A model's identity: everything that changes its results, by name. Torch-free.

Two nodes hand K/V over, and a node reads what another has left in a tier, only if their models are
one. That means: equal parsed configs, whatever the files leave to defaults; equal bytes of all
tensors; equal types of compute, K/V and states; the same kernels and quantization. A checkpoint in
8-bit floats and its original are two models: their bytes differ, and so do most weights that are
computed with. The kind of device does not count, nor does the number of threads: by torch's
operators a P on a GPU with a D on a CPU is a pair whose tokens are equal (benchmarks/pages/gpu.md).
So both may share the folder of a tier, too. Nor do tokenizer, chat template and limits count: they
change no K/V.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final

import msgspec

from engine.compute_config import Quantization
from engine.model_configs.model_config import Block, ModelConfig, PartConfig

IDENTITY_VERSION: Final = 2
"""Goes up where this code computes another result from the same config and weights."""
LAYERS: Final = "layers"
NONE: Final = "-"
NOT_COUNTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ModelConfig.max_position_embeddings": "bounds requests; rotary tables grow as needed",
        "ModelConfig.tie_word_embeddings": "a stored head is used, else there is none: the weights "
        "say which",
        "ModelConfig.layers": "its parts stand under their names, and their order in `layers`",
        "ModelConfig.renames": "where tensors are found, not what they are",
    }
)
"""Fields of config classes that change no result, and why; every other field counts."""


@dataclass(frozen=True)
class ModelIdentity:
    """`fields`: by name the text of everything that counts; two models are one if they are equal.

    `layers` names each layer's parts, one word a layer: `attention/mlp` are two blocks,
    `attention+mamba2:norm` is one of two parts, normed after, `mlp:bare:norm` one without a norm
    before, and `mlp:residual*2.0` one that is added to twice its normed input. The fields of a part
    stand under its name, such as `attention.rope.theta`. A second kind of attention is
    `attention_2`.
    """

    fields: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """32 hex digits of all fields: names files and tables that hold this model's K/V alone."""
        named = (IDENTITY_VERSION, sorted(self.fields.items()))
        return hashlib.sha256(msgspec.json.encode(named)).hexdigest()[:32]


def identity_of(
    config: ModelConfig, weights: str, *, kernels: str, quantization: Quantization | None = None
) -> ModelIdentity:
    """The identity of a model.

    `weights` is the digest of its tensors as they are stored, `kernels` the name of the operators
    that compute, and `quantization` that of linear layers' matrices at load.
    """
    named: dict[PartConfig, str] = {}
    for part in (part for own in config.layers for block in own for _, part in block.parts):
        if part not in named:
            words = re.findall("[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", type(part).__name__)[:-1]
            kind, others = "_".join(words).lower(), sum(type(it) is type(part) for it in named)
            named[part] = f"{kind}_{others + 1}" if others else kind
    layers = ["/".join(_block(block, named) for block in own) or NONE for own in config.layers]
    found = dict(_flat(config, ""))
    for part, name in named.items():
        found.update(_flat(part, f"{name}."))
    found |= {LAYERS: " ".join(layers), "weights": weights, "kernels": kernels}
    found["weight_quantization"] = _text(quantization)
    return ModelIdentity(MappingProxyType(found))


def _block(block: Block, named: Mapping[PartConfig, str]) -> str:
    parts = "+".join(named[part] for _, part in block.parts)
    bare = ":bare" if block.norm is None else ""
    norm = "" if block.post_norm is None else ":norm"
    residual = "" if (scale := block.normed_residual) is None else f":residual*{scale!r}"
    return f"{parts}{bare}{norm}{residual}"


def by_layer(layers: str, most: int) -> Iterator[tuple[str, str]]:
    """`layers` of an identity, as one name and value for each layer; what is over stays one."""
    for number, parts in enumerate(layers.split(maxsplit=most)):
        yield f"layer {number}", parts


def _flat(config: object, prefix: str) -> Iterator[tuple[str, str]]:
    """The fields that count, and those of configs inside; raises TypeError for unknown types."""
    assert is_dataclass(config)
    for field in fields(config):
        if f"{type(config).__name__}.{field.name}" in NOT_COUNTED:
            continue
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from _flat(value, f"{name}.")
        else:
            yield name, _text(value)


def _text(value: object) -> str:
    """One text for each value, the same in every process: not every object has such a `repr`."""
    if isinstance(value, str):
        return str(value)  # an enum's own text too
    if isinstance(value, tuple):
        return " ".join(map(_text, value))
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    raise TypeError(f"{value!r} has no text that names it in an identity: teach it to `_text`")
