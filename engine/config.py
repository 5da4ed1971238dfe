"""Every option of a node, frozen; names are vLLM's flags with underscores, unknown keys are errors.

Composed by `engine/node/cli.py` from flags and file; nobody changes a config after construction.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
DRAIN_TIMEOUT_S = 20.0
"""Leaves a third of the 30 s after which Kubernetes kills, for the end of what is cut."""
ListenPort = Annotated[int, Meta(ge=0, le=65_535)]
SchedulingPolicy = Literal["fcfs", "priority"]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration structs."""


def check_secrets(**secrets: str | None) -> None:
    """Raises ValueError, which decoding reports as a ConfigError; None was not given.

    An empty secret would be no secret, and what ends a line comes from the file that it was in.
    """
    for name, secret in secrets.items():
        if secret is not None and not secret.strip():
            raise ValueError(f"{name} is empty: give it a value, or do not give it at all")
        if secret is not None and not secret.isprintable():
            raise ValueError(f"{name} has line ends or control characters: remove them")


class KVTransferConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--kv-transfer-config`; the connector decodes its own `kv_connector_extra_config`."""

    kv_connector: str = "PdConnector"
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_connector_extra_config: dict[str, Any] = {}


class KVEventsConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`: where KV cache events are published."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: Positive = 10_000
    hwm: Positive = 100_000
    topic: str = ""


class SchedulerConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much one step does, who is next, and where decoding keeps states.

    With the policy `fcfs` no request may bring a priority.
    """

    max_model_len: Positive
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] = 2048
    max_num_waiting: Positive = 1024
    scheduling_policy: SchedulingPolicy = "fcfs"
    mamba_decode_checkpoint_interval: NotNegative = 0


class NodeConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prefill or decode node, flag for flag.

    `mamba_decode_checkpoint_interval`: a request that decodes keeps its Mamba states for others
    whenever prompt and output together reach a multiple of so many tokens; 0: never.
    `advertise_host`: where peers find what listens on `host`, when that is a wildcard.
    `device`: where weights and arena live and the model runs.
    """

    model: str
    host: str = "127.0.0.1"
    advertise_host: str | None = None
    port: ListenPort = 8000
    grpc_port: ListenPort = 0
    served_model_name: tuple[str, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")] = "cpu"
    max_model_len: Positive | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] = 2048
    block_size: Annotated[int, Meta(ge=1, le=65_536)] = 16
    kv_cache_memory_bytes: Positive = 512 << 20
    scheduling_policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    prefix_hash_seed: str = ""
    mamba_checkpoint_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    mamba_decode_checkpoint_interval: NotNegative = 0
    kv_transfer_config: KVTransferConfig = KVTransferConfig()
    kv_events_config: KVEventsConfig = KVEventsConfig()
    enable_prompt_tokens_details: bool = False
    api_key: str | None = None
    cluster_token: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    num_threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    drain_timeout: Seconds = DRAIN_TIMEOUT_S

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding reports as a ConfigError."""
        check_secrets(api_key=self.api_key, cluster_token=self.cluster_token)

    def scheduler(self, max_model_len: int) -> SchedulerConfig:
        """The part that the scheduler reads."""
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            scheduling_policy=self.scheduling_policy,
            mamba_decode_checkpoint_interval=self.mamba_decode_checkpoint_interval,
        )


ConfigT = TypeVar("ConfigT", bound=Config)


def decode_config(fields: Mapping[str, object], kind: type[ConfigT], source: str) -> ConfigT:
    """`fields` as a `kind`; raises ConfigError naming `source`, the key and what was expected."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def parse_json_object(text: str, flag: str) -> dict[str, Any]:
    """The JSON object given to `flag`; raises ConfigError when it is anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON: {error}; got {text!r}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text!r}")
    return value


def read_flags_file(file: Path) -> dict[str, Any]:
    """The YAML behind `--config`: its keys are the flags' names, with - or _.

    Raises ConfigError naming the file when it cannot be read or is no mapping.
    """
    return {str(key).replace("-", "_"): value for key, value in read_yaml(file).items()}


def read_yaml(file: Path) -> dict[Any, Any]:
    """The mapping in `file`; raises ConfigError naming the file when there is none."""
    try:
        fields = msgspec.yaml.decode(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} must hold a mapping in YAML: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} must hold a mapping in YAML")
    return fields
