"""Every option of a server, written once: name, type, bounds, default, and the help of its flag.

Names are vLLM's flags with underscores; unknown keys are errors. `cli.py` makes flags of the
fields, `load_config` puts flags over a file over defaults; a config never changes afterwards.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.compute_config import ComputeConfig, KernelChoice, Quantization
from engine.errors import ConfigError
from engine.types import SchedulingPolicy

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
MAX_PORT = 65_535
ListenPort = Annotated[int, Meta(ge=0, le=MAX_PORT)]
EventCount = Annotated[int, Meta(ge=1, le=10_000_000)]
ContentFormat = Literal["auto", "string", "openai"]
LogLevel = Literal["debug", "info", "warning", "error"]
ToolCallParser = Literal[
    "auto", "none", "hermes", "granite4", "qwen3_coder", "qwen3_xml", "nemotron_json"
]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1", "nemotron_v3", "granite"]
# ZeroMQ knows more kinds, but no other process reaches inproc:// and the rest is multicast.
_ZMQ_ADDRESS = re.compile(r"tcp://(\*|[\w.-]+|\[[\w.:%]+\]):(?P<port>\d{1,5})|ipc://.+")

_ORIGIN = re.compile(r"\*|https?://[^\s/?#,\"\[\]]+|https?://\[[0-9a-f:]+\](:\d+)?")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration structs.

    Of a field, `Meta(description=)` is the help of its flag; in `Meta(extra=)`, `envvar` names a
    variable that gives it too, and `argument` makes it a positional argument.
    """

    def check(self) -> None:
        """Raises ConfigError for options that do not go together, or that are missing."""


class KVTransferConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--kv-transfer-config`; the connector decodes its own `kv_connector_extra_config`."""

    kv_connector: Annotated[
        str, Meta(description="PdConnector, OffloadConnector or MultiConnector.")
    ] = "PdConnector"
    kv_role: Annotated[
        Literal["kv_producer", "kv_consumer", "kv_both"],
        Meta(description="Hand prefills over (producer), take them (consumer), or both."),
    ] = "kv_both"
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Meta(description="What happens to a prompt that cannot be pulled or loaded."),
    ] = "recompute"
    kv_connector_extra_config: Annotated[
        dict[str, Any], Meta(description="The connector's own options, below.")
    ] = {}


class KVEventsConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`, and `encoding`: how KV cache events are published.

    Addresses are ZeroMQ's. As in vLLM one with a wildcard, `ipc://` or port 0 is listened on, and
    any other `endpoint` is a collector to connect to. What is not given is a free port of `--host`.
    Events hold the tokens of prompts, and whoever reaches the ports may read them.
    """

    enable_kv_cache_events: Annotated[
        bool, Meta(description="Tell others what the cache and the tiers hold.")
    ] = False
    publisher: Annotated[Literal["zmq", "null"], Meta(description="By ZeroMQ, or not at all.")] = (
        "zmq"
    )
    endpoint: Annotated[
        str | None,
        Meta(
            description="PUB: `tcp://*:5557`, `ipc://PATH` or port 0 is listened on; any other "
            "address is a collector to connect to. Default: a free port of `--host`."
        ),
    ] = None
    replay_endpoint: Annotated[
        str | None,
        Meta(
            description="ROUTER: repeats batches from a sequence number on, and gives snapshots. "
            "Default: a free port of `--host`."
        ),
    ] = None
    buffer_steps: Annotated[EventCount, Meta(description="Batches kept for replay.")] = 10_000
    hwm: Annotated[EventCount, Meta(description="Batches kept for a slow subscriber.")] = 100_000
    max_queue_size: Annotated[
        EventCount, Meta(description="Batches kept before they are sent.")
    ] = 100_000
    topic: Annotated[
        str, Meta(max_length=256, description="For consumers that read it, as `kv@POD@MODEL`.")
    ] = ""
    encoding: Annotated[
        Literal["map", "array"],
        Meta(description="`map`: vLLM's present form; `array`: its former one."),
    ] = "map"

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding reports as a ConfigError."""
        given = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        for name, address in given.items():
            match = None if address is None else _ZMQ_ADDRESS.fullmatch(address)
            if address is not None and (match is None or int(match["port"] or 0) > MAX_PORT):
                raise ValueError(
                    f"{name} {address!r} is no address: write tcp://HOST:PORT, tcp://*:PORT or "
                    "ipc://PATH"
                )
        # Port 0 stands for any free one, so two of them are two ports.
        same = self.endpoint is not None and self.endpoint == self.replay_endpoint
        if same and not str(self.endpoint).endswith(":0"):
            raise ValueError(f"endpoint and replay_endpoint are both {self.endpoint}: change one")

    @property
    def is_published(self) -> bool:
        """True if a node announces what its cache holds."""
        return self.enable_kv_cache_events and self.publisher != "null"


class StructuredOutputsConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--structured-outputs-config`."""

    enable_in_reasoning: bool = False


class ServerConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that nodes and the proxy spell alike."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[ListenPort, Meta(description="HTTP port, 0 for any.")] = 8000
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(description="Model's name in the API; repeat for several. Default: its own."),
    ] = ()
    enable_prompt_tokens_details: Annotated[
        bool, Meta(description="Tell clients in `usage` how many prompt tokens were cached.")
    ] = False
    enable_reset_prefix_cache: Annotated[
        bool,
        Meta(
            description="Serve POST /reset_prefix_cache, which empties the cache of a node that is "
            "idle; at the proxy, of all nodes that have this flag too."
        ),
    ] = False
    api_key: Annotated[
        str | None,
        Meta(description="Key that HTTP clients must send.", extra={"envvar": "VLLM_API_KEY"}),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origin of web pages whose scripts may ask, as https://example.com, or *; "
            "repeat for several."
        ),
    ] = ()
    tool_call_parser: Annotated[
        ToolCallParser,
        Meta(
            description="How the model writes tool calls: hermes, granite4, qwen3_coder, "
            "qwen3_xml, nemotron_json, none, or auto, as its chat template tells."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(
            description="How the model marks its thoughts: qwen3, deepseek_r1, nemotron_v3, "
            "granite, none, or auto, as its chat template or its tokens tell."
        ),
    ] = "auto"
    structured_outputs_config: Annotated[
        StructuredOutputsConfig,
        Meta(
            description="JSON: enable_in_reasoning (grammars bind thoughts, too, and not only "
            "what follows them)."
        ),
    ] = StructuredOutputsConfig()
    chat_template: Annotated[
        str | None,
        Meta(
            description="Chat template instead of the model's: a file, or the template's text. "
            "A proxy has that of its nodes."
        ),
    ] = None
    chat_template_content_format: Annotated[
        ContentFormat,
        Meta(
            description="What the chat template takes a message's text as: string, openai (a list "
            "of content parts), or auto, which tries."
        ),
    ] = "auto"
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        Meta(description="Serve /tokenizer_info: tokenizer_config.json and the chat template."),
    ] = False
    strict_api: Annotated[
        bool, Meta(description="Refuse requests with unknown keys instead of ignoring the keys.")
    ] = False
    cluster_token: Annotated[
        str | None,
        Meta(
            description="Shared secret of all nodes and the proxy, long and random. It is never "
            "sent. Without it gRPC serves this machine only.",
            extra={"envvar": "TANDEM_CLUSTER_TOKEN"},
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Meta(
            description="Certificates (PEM) to serve TLS with: HTTP, and gRPC of nodes; with "
            "--ssl-keyfile. What transports move (blocks, states) is not encrypted by it."
        ),
    ] = None
    ssl_keyfile: Annotated[str | None, Meta(description="The key of --ssl-certfile (PEM).")] = None
    ssl_ca_certs: Annotated[
        str | None,
        Meta(description="Authorities (PEM) that nodes are verified with. Default: the machine's."),
    ] = None
    log_level: Annotated[
        LogLevel, Meta(description="debug, info, warning or error: what is logged.")
    ] = "info"
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="OpenTelemetry collector that spans of requests go to: http://HOST:4317 "
            "(gRPC) or http://HOST:4318/v1/traces. Needs the extra otel."
        ),
    ] = None
    # Pools keep connections for 60 s (nginx, ALB) to 90 s (Go); who closes later cuts no request.
    timeout_keep_alive: Annotated[
        Seconds,
        Meta(
            description="Seconds that a connection may be idle between requests; longer than what "
            "clients and load balancers keep theirs for, else requests meet a closing connection."
        ),
    ] = 120.0
    sse_keep_alive_interval: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86_400.0,
            description="Seconds of silence after which a stream sends a comment, also before its "
            "first token: errors of the prefill then are events of a 200. 0: never.",
        ),
    ] = 0.0
    # A third of the 30 s after which Kubernetes kills is left for the end of what is cut off.
    drain_timeout: Annotated[
        Seconds,
        Meta(
            description="Seconds that running requests get after SIGTERM, before they end with an "
            "error."
        ),
    ] = 20.0

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding reports as a ConfigError.

        An empty secret would be no secret, and the end of a line comes from the file it was in.
        """
        for name, secret in (("api_key", self.api_key), ("cluster_token", self.cluster_token)):
            if secret is not None and not secret.strip():
                raise ValueError(f"{name} is empty: give it a value, or do not give it at all")
            if secret is not None and not secret.isprintable():
                raise ValueError(f"{name} has line ends or control characters: remove them")
        if self.api_key is not None and self.api_key != self.api_key.strip():
            raise ValueError("api_key begins or ends with a space, which no header carries")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins: {origin!r} is no origin: write https://HOST, "
                    "http://HOST:PORT or *"
                )


class NodeConfig(ServerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prefill or decode node, flag for flag."""

    model: Annotated[
        str, Meta(description="Hugging Face folder, or hub name.", extra={"argument": True})
    ] = ""
    advertise_host: Annotated[
        str | None,
        Meta(
            description="Address of this machine that peers are told. Default: --host; where that "
            "is 0.0.0.0 or ::, the address of the default route."
        ),
    ] = None
    grpc_port: Annotated[
        ListenPort, Meta(description="Port of control and token streams, 0 for any.")
    ] = 0
    proxy: Annotated[
        tuple[str, ...],
        Meta(
            description="A proxy to register with: http://host:port (its HTTP port) or "
            "grpc://host:port (its --grpc-port), with TLS https:// or grpcs://; repeat for "
            "several. A name with several addresses stands for a proxy at each."
        ),
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="auto, float32, bfloat16 or float16. auto is the checkpoint's, of 8-bit "
            "floats bfloat16; on a CPU float16 becomes float32."
        ),
    ] = "auto"
    device: Annotated[
        str,
        Meta(
            pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$",
            description="Where weights and arena are and the model runs: cpu, cuda or cuda:N.",
        ),
    ] = "cpu"
    max_model_len: Annotated[
        Positive | None,
        Meta(description="Context in tokens. Default: what model and memory allow."),
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="Requests in a batch.")] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, le=1_048_576, description="Tokens computed in one step.")
    ] = 2048
    block_size: Annotated[
        int, Meta(ge=1, le=65_536, description="Tokens in an attention block.")
    ] = 16
    # None, since the default depends on another option; `plan_arena` knows all block sizes.
    hash_block_size: Annotated[
        Positive | None,
        Meta(
            description="Tokens per digest, the step of prefix hits and KV events; divides all "
            "attention blocks. Default: the largest such number up to 16."
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[Positive, Meta(description="Size of the KV arena.")] = (
        512 << 20
    )
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Meta(
            description="fcfs: first come, first served; priority: a request's `priority` counts "
            "first, lower is sooner, and any client may set it."
        ),
    ] = "fcfs"
    enable_prefix_caching: Annotated[
        bool,
        Meta(description="Keep blocks and Mamba states of served prefixes for later requests."),
    ] = True
    prefix_hash_seed: Annotated[
        str,
        Meta(
            description="Keys the digests of prefixes; the same on all nodes of a cluster. "
            "Default: none."
        ),
    ] = ""
    mamba_checkpoint_share: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description="Part of the arena that unused kept Mamba states may fill, 0 to 1.",
        ),
    ] = 0.5
    mamba_decode_checkpoint_interval: Annotated[
        NotNegative,
        Meta(
            description="While decoding, keep Mamba states for reuse every so many tokens of "
            "prompt and output, a multiple of --block-size; 0: never."
        ),
    ] = 0
    kv_transfer_config: Annotated[
        KVTransferConfig,
        Meta(
            description='JSON: kv_connector ("PdConnector"), kv_role (kv_both, kv_producer, '
            "kv_consumer), kv_load_failure_policy (recompute, fail), kv_connector_extra_config "
            "(transport: auto, shm, cuda_ipc, nixl, ucx, zmq; kv_lease_duration; "
            "bidirectional_kv_xfer; ...)."
        ),
    ] = KVTransferConfig()
    kv_events_config: Annotated[
        KVEventsConfig,
        Meta(
            description="JSON: enable_kv_cache_events, publisher (zmq, null), endpoint, "
            "replay_endpoint, buffer_steps, hwm, max_queue_size, topic, encoding (map, array)."
        ),
    ] = KVEventsConfig()
    kernels: Annotated[
        KernelChoice,
        Meta(
            description="auto: compiled kernels where this processor runs them; torch: its own "
            "operators. All nodes of a cluster must run the same, which the log names at start."
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        Meta(
            description="int8: matrices of linear layers are rounded when they are loaded, by "
            "groups of 64 inputs, and so is what they multiply. All nodes of a cluster must choose "
            "alike. By default weights are computed with as config.json says."
        ),
    ] = None
    num_threads: Annotated[
        int, Meta(ge=1, le=1024, description="torch threads; more than cores is far slower.")
    ] = 1

    @property
    def compute(self) -> ComputeConfig:
        """The options that the loader of the model takes."""
        return ComputeConfig(self.kernels, self.quantization)

    def check(self) -> None:
        if not self.model:
            raise ConfigError("no model: give a folder or hub name as first argument")
        if self.kv_events_config.enable_kv_cache_events and not self.enable_prefix_caching:
            raise ConfigError("KV cache events need prefix caching: drop one of the two options")


DEFAULTS = NodeConfig()

ConfigT = TypeVar("ConfigT", bound=Config)
ServerConfigT = TypeVar("ServerConfigT", bound=ServerConfig)


def decode_config(fields: Mapping[str, object], kind: type[ConfigT], source: str) -> ConfigT:
    """`fields` as a `kind`; raises ConfigError naming `source`, the key and what was expected."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def load_config(
    kind: type[ConfigT],
    file: Path | None,
    flags: Mapping[str, object],
    *,
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> ConfigT:
    """`flags` over `file` over `defaults` over the defaults of `kind`; flags of None are not given.

    A text where `kind` has a struct is JSON. The file is YAML; its keys are the flags' names, with
    - or _. Raises ConfigError naming the file or flag, the key and the value.
    """
    # Later ones win: defaults of the program, then the file, then flags.
    fields = dict(defaults)
    if file is not None:
        fields |= {str(key).replace("-", "_"): value for key, value in read_yaml(file).items()}
    fields |= {key: _listed(value) for key, value in flags.items() if value is not None}
    for field in msgspec.structs.fields(kind):
        if isinstance(field.default, Config) and isinstance(text := flags.get(field.name), str):
            try:
                fields[field.name] = msgspec.json.decode(text, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeError) as error:
                flag = "--" + field.name.replace("_", "-")
                raise ConfigError(f"{flag} must be a JSON object: {error}; got {text!r}") from error
    config = decode_config(fields, kind, str(file) if file else "flags")
    config.check()
    return config


def _listed(value: object) -> object:
    """A flag that may be repeated, given once as a JSON list, as vLLM does."""
    if isinstance(value, list | tuple) and len(value) == 1 and str(value[0]).startswith("["):
        with suppress(msgspec.DecodeError, UnicodeError):
            return msgspec.json.decode(value[0], type=list[str])
    return value


def read_yaml(file: Path) -> dict[Any, Any]:
    """The mapping in `file`; raises ConfigError naming the file when there is none."""
    try:
        return msgspec.yaml.decode(file.read_bytes(), type=dict[Any, Any])
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} must hold a mapping in YAML: {error}") from error
