"""Flags of `vllm serve` that Tandem does not have: without effect here, or refused with a cure.

A command line copied from vLLM should start where it means the same, and must not start where it
would mean something that is not done. Names and values: vLLM 0.32.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from engine.errors import ConfigError

SWITCHES: Final = frozenset(
    {
        "--enable-auto-tool-choice",
        "--trust-remote-code",
        "--enable-log-requests",
        "--no-enable-log-requests",
        "--disable-log-requests",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        "--disable-frontend-multiprocessing",
        "--enable-server-load-tracking",
        "--enable-chunked-prefill",
        "--enforce-eager",
        "--async-scheduling",
        "--no-async-scheduling",
        "--disable-cascade-attn",
        "--disable-custom-all-reduce",
    }
)
"""Without a value and without effect: what they ask for is always so, or changes no answer."""

ANY_VALUE: Final = frozenset(
    {
        "--seed",
        "--max-log-len",
        "--uvicorn-log-level",
        "--swap-space",
        "--attention-backend",
        "--compilation-config",
        "--distributed-executor-backend",
        "--guided-decoding-backend",
        "--max-seq-len-to-capture",
        "--max-parallel-loading-workers",
    }
)
"""Without effect, whatever their value is: they change speed and logs."""

ONLY: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "--tensor-parallel-size": ("1",),
        "--pipeline-parallel-size": ("1",),
        "--data-parallel-size": ("1",),
        "--decode-context-parallel-size": ("1",),
        "--cpu-offload-gb": ("0",),
        "--load-format": ("auto", "safetensors"),
        "--config-format": ("auto", "hf"),
        "--tokenizer-mode": ("auto",),
        "--generation-config": ("auto",),
        "--kv-cache-dtype": ("auto",),
        "--runner": ("auto", "generate"),
        "--task": ("auto", "generate"),
        "--model-impl": ("auto",),
        "--response-role": ("assistant",),
    }
)
"""Without effect with these values, which say what is done anyway; refused with others."""

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--model": "write the model without a flag",
        "--tokenizer": "the tokenizer is that of the model folder",
        "--revision": "download that revision, and give its folder",
        "--download-dir": "set HF_HOME",
        "--hf-overrides": "change the folder's config.json",
        "--gpu-memory-utilization": "give --kv-cache-memory-bytes",
        "--num-gpu-blocks-override": "give --kv-cache-memory-bytes",
        "--enable-lora": "merge the adapter into the weights",
        "--lora-modules": "merge the adapter into the weights",
        "--speculative-config": "nothing is drafted here",
        "--root-path": "let the proxy in front remove the prefix",
        "--uds": "give --host and --port",
        "--tool-parser-plugin": "choose one of --tool-call-parser",
    }
)
"""They would mean something; with what to do instead."""

OTHER_VALUES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = MappingProxyType(
    {
        "--quantization": (
            ("int8",),
            "leave it out: config.json says how weights are stored, and those in 8-bit floats are "
            "read; int8 rounds any weights when they are loaded",
        ),
    }
)
"""Flags of both, the values that are served, and what to do instead of giving vLLM's others."""

SHORT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "-tp": "--tensor-parallel-size",
        "-pp": "--pipeline-parallel-size",
        "-dp": "--data-parallel-size",
        "-q": "--quantization",
    }
)


def without_vllm_flags(
    arguments: Collection[str], own: Collection[str]
) -> tuple[list[str], list[str]]:
    """The arguments without those flags of vLLM that have no effect here, and the latter.

    `own`: flags of the program, which go first. Raises ConfigError for flags that are refused.
    """
    kept: list[str] = []
    ignored: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        flag = SHORT.get(flag, flag)
        if flag in own and flag in OTHER_VALUES:
            # Also under its short name, which is vLLM's.
            value = value if equals else next(rest, "")
            _check_value(flag, value)
            kept += [flag, value]
            continue
        if flag in own or flag not in SWITCHES | ANY_VALUE | ONLY.keys() | REFUSED.keys():
            kept.append(argument)
            continue
        if flag in REFUSED:
            raise ConfigError(f"{flag} of vLLM is not served here: {REFUSED[flag]}")
        if flag not in SWITCHES and not equals and not (value := next(rest, "")):
            raise ConfigError(f"{flag} of vLLM needs a value")
        if flag in ONLY and value not in ONLY[flag]:
            known = " or ".join(ONLY[flag])
            raise ConfigError(f"{flag} {value!r} of vLLM is not served here: only {known}")
        ignored.append(f"{flag} {value}".strip())
    return kept, ignored


def _check_value(flag: str, value: str) -> None:
    served, cure = OTHER_VALUES[flag]
    if value not in served:
        raise ConfigError(f"{flag} {value!r} of vLLM is not served here: {cure}")
