"""The command line of a node, the same for every kind of node; names are vLLM's."""

from collections.abc import Callable
from typing import Annotated

import typer

from engine.config import NodeConfig
from engine.flags import (
    ApiKey,
    ClusterToken,
    ConfigFile,
    DrainTimeout,
    Host,
    PromptTokensDetails,
    ServedModelName,
    SslCaCerts,
    SslCertfile,
    SslKeyfile,
    given_flags,
)
from engine.node.settings import node_config
from engine.process import Server, run_server

PURPOSE = (
    "Run a Tandem {kind} node: an OpenAI-compatible server that can also hand prefills over to, "
    "or take them from, other nodes. Without --port it listens on {port}."
)

Integer = int | None
Text = str | None
Model = Annotated[Text, typer.Argument(help="Hugging Face folder, or hub name.")]
AdvertiseHost = Annotated[
    Text,
    typer.Option(
        help="Address of this machine that peers are told. Default: --host; where that is 0.0.0.0 "
        "or ::, the address of the default route."
    ),
]
Port = Annotated[Integer, typer.Option(help="HTTP port, 0 for any.")]
GrpcPort = Annotated[
    Integer, typer.Option(help="Port of control and token streams, 0 for any. [0]")
]
Dtype = Annotated[Text, typer.Option(help="auto, float32, bfloat16 or float16. [auto]")]
Device = Annotated[Text, typer.Option(help="cpu, cuda or cuda:N. [cpu]")]
MaxModelLen = Annotated[
    Integer, typer.Option(help="Context in tokens. Default: what model and memory allow.")
]
MaxNumSeqs = Annotated[Integer, typer.Option(help="Requests in a batch. [64]")]
MaxBatchedTokens = Annotated[Integer, typer.Option(help="Tokens computed in one step. [2048]")]
BlockSize = Annotated[Integer, typer.Option(help="Tokens in an attention block. [16]")]
ArenaBytes = Annotated[Integer, typer.Option(help="Size of the KV arena. [536870912]")]
Scheduling = Annotated[
    Text,
    typer.Option(
        help="fcfs: first come, first served; priority: a request's `priority` counts first, "
        "lower is sooner, and any client may set it. [fcfs]"
    ),
]
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep blocks and Mamba states of served prefixes for later requests. [yes]",
    ),
]
HashSeed = Annotated[
    Text,
    typer.Option(help="Keys the digests of prefixes; the same on all nodes of a cluster. [none]"),
]
CheckpointShare = Annotated[
    float | None,
    typer.Option(help="Part of the arena that unused kept Mamba states may fill, 0 to 1. [0.5]"),
]
DecodeCheckpoints = Annotated[
    Integer,
    typer.Option(
        help="While decoding, keep Mamba states for reuse every so many tokens of prompt and "
        "output, a multiple of --block-size; 0: never. [0]"
    ),
]
TransferConfig = Annotated[
    Text,
    typer.Option(
        help='JSON: kv_connector ("PdConnector"), kv_role (kv_both, kv_producer, kv_consumer), '
        "kv_load_failure_policy (recompute, fail), kv_connector_extra_config "
        "(transport: auto, shm, nixl, ucx, zmq; kv_lease_duration; bidirectional_kv_xfer; ...)."
    ),
]
EventsConfig = Annotated[
    Text, typer.Option(help="JSON: enable_kv_cache_events, endpoint, topic, ...")
]
NumThreads = Annotated[
    Integer, typer.Option(help="torch threads; more than cores is far slower. [1]")
]


def node_app(
    kind: str, default_port: int, make_server: Callable[[NodeConfig], Server]
) -> typer.Typer:
    """A typer app with one command, which runs a `kind` node."""
    # Without rich's markup, which takes [words] in brackets for styles and cuts long flags short.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    # typer makes the flags of the signature; their values are read together, from the context.
    @app.command(help=PURPOSE.format(kind=kind, port=default_port))
    def run(
        context: typer.Context,
        model: Model = None,
        host: Host = None,
        advertise_host: AdvertiseHost = None,
        port: Port = None,
        grpc_port: GrpcPort = None,
        served_model_name: ServedModelName = None,
        dtype: Dtype = None,
        device: Device = None,
        max_model_len: MaxModelLen = None,
        max_num_seqs: MaxNumSeqs = None,
        max_num_batched_tokens: MaxBatchedTokens = None,
        block_size: BlockSize = None,
        kv_cache_memory_bytes: ArenaBytes = None,
        scheduling_policy: Scheduling = None,
        enable_prefix_caching: PrefixCaching = None,
        prefix_hash_seed: HashSeed = None,
        mamba_checkpoint_share: CheckpointShare = None,
        mamba_decode_checkpoint_interval: DecodeCheckpoints = None,
        kv_transfer_config: TransferConfig = None,
        kv_events_config: EventsConfig = None,
        enable_prompt_tokens_details: PromptTokensDetails = None,
        api_key: ApiKey = None,
        cluster_token: ClusterToken = None,
        ssl_certfile: SslCertfile = None,
        ssl_keyfile: SslKeyfile = None,
        ssl_ca_certs: SslCaCerts = None,
        num_threads: NumThreads = None,
        drain_timeout: DrainTimeout = None,
        config: ConfigFile = None,
    ) -> None:
        flags = given_flags(context)
        run_server(lambda: make_server(node_config(flags, config, {"port": default_port})))

    return app
