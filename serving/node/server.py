"""Assembly and life of one node: model, arena, engine thread, connector, gRPC and HTTP.

The same for every kind of node; what a kind adds is its name and its connector.
"""

import asyncio
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.arena import ArenaMemory
from engine.async_engine import AsyncEngine, EngineLimits
from engine.core import EngineCore
from engine.families.registry import read_config
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.kv_cache.listener import CacheListener, CacheListeners
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.report import plan_labels, plan_report
from engine.model_configs.generation import read_eos_token_ids
from engine.model_configs.identity import ModelIdentity
from engine.model_configs.model_config import ModelConfig
from engine.model_files import resolve_folder
from engine.models.loader import CausalLM, load_and_identify
from engine.safetensors_headers import read_headers
from engine.sched.scheduler import Scheduler
from engine.sched.stats import STEP_BUCKETS
from engine.worker.model_runner import ModelRunner
from serving.api.access import access_of
from serving.api.app import create_app
from serving.api.chat_template import given_template
from serving.api.operations import reset_route
from serving.api.served_model import SamplingDefaults, ServedModel, load_sampling_defaults
from serving.api.tokenizer import Tokenizer, load_tokenizer
from serving.config import NodeConfig
from serving.hosts import addresses_here, advertised_host
from serving.http.connection import ConnectionLimits
from serving.http.server import HttpServer
from serving.memory_plan import Batch, memory_report, plan_memory
from serving.metrics import (
    EVENT_COUNTERS,
    GRAMMAR_GAUGES,
    SCHEDULER_COUNTERS,
    SCHEDULER_GAUGES,
    NodeMetrics,
)
from serving.node.callers import tls_to_peers, token_for_calls
from serving.node.connector import BuilderOf, NodeConnector, NodeParts, check_groups
from serving.node.kv_events import NodeEvents
from serving.node.limits import (
    check_decode_checkpoints,
    check_device,
    check_device_memory,
    check_memory,
    check_ports,
    context_length,
    scheduler_config,
)
from serving.process import wait_until
from serving.rpc.address import join_host_port
from serving.rpc.messages import ArenaUse, NodeInfo
from serving.rpc.node_http import parse_node_url
from serving.rpc.node_service import NodeService
from serving.rpc.registration import Introduction, Registration
from serving.rpc.server import RpcServer, start_server
from serving.rpc.tokenizer_files import tokenizer_files
from serving.telemetry.request_metrics import EngineRequestMetrics
from serving.telemetry.telemetry import Telemetry
from serving.tls import client_tls, server_tls

log = structlog.get_logger()

END_OF_REQUESTS_S = 2.0
"""For the last bytes of requests that have ended."""


@dataclass(slots=True, frozen=True)
class ModelFolder:
    """All that a model folder says, except its tensors."""

    path: Path
    config: ModelConfig
    names: tuple[str, ...]
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    files: Mapping[str, bytes]
    """The files that a proxy is sent."""

    @classmethod
    def read(cls, options: NodeConfig) -> "ModelFolder":
        """Raises ConfigError or CheckpointError for a folder that no node can serve."""
        path = resolve_folder(options.model)
        config = read_config(path, options.dtype, device=options.device)
        template = given_template(options.chat_template)
        tokenizer = load_tokenizer(path, template, options.chat_template_content_format)
        ends = read_eos_token_ids(path, config.vocab_size, tokenizer.eos_token_id)
        return cls(
            path,
            config,
            names=options.served_model_name or (options.model,),
            eos_token_ids=frozenset(ends),
            tokenizer=tokenizer,
            defaults=load_sampling_defaults(path),
            files=tokenizer_files(path, template),
        )


class NodeServer:
    """One node: `start`, `wait` or do other things, `close`; ports are known after `start`.

    `engine_id` names one life of one process: a restarted node is a new peer, also on its old port.
    """

    def __init__(self, config: NodeConfig, kind: str, builder_of: BuilderOf) -> None:
        """Raises ConfigError for a `kv_transfer_config` that no connector takes."""
        self.config = config
        self.kind = kind
        self.engine_id = f"{kind}-{secrets.token_hex(8)}"
        self._build_connector = builder_of(config.kv_transfer_config)
        # What `close` gives back, the last first: each step of `_start` adds its own.
        self._resources = AsyncExitStack()

    @property
    def url(self) -> str:
        """Base URL of the HTTP server, as others on the network see it."""
        scheme = "http" if self.config.ssl_certfile is None else "https"
        return f"{scheme}://{join_host_port(self.host, self.http.port)}"

    async def start(self) -> None:
        """Loads the model and serves. Raises ConfigError or CheckpointError, and then frees all."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def drain(self) -> None:
        """Refuses new requests; peers may still read what is held for them.

        Returns when nobody waits for anything here, or after `--drain-timeout`.
        """
        engine = self.engine
        # First, so that no proxy sends a request that would be refused.
        await self.registration.leave()
        engine.refuse_new()
        log.info("node drains", num_requests=engine.num_open)
        await wait_until(
            lambda: not engine.is_alive or not (engine.num_open or self.connector.is_awaited()),
            self.config.drain_timeout,
        )

    async def wait(self) -> None:
        """Returns when the node was closed. Raises EngineDeadError when its engine died."""
        await self.engine.wait()

    async def close(self) -> None:
        """Ends requests, stops serving, then the engine, then gives memory back."""
        await self._resources.aclose()

    async def _start(self) -> None:
        # Each step frees what it made through `_resources`, the last first: requests end, servers
        # stop, then the engine, the connector, and the arena after its last reader.
        self._check_options()
        torch.set_num_threads(self.config.num_threads)
        model = await asyncio.to_thread(ModelFolder.read, self.config)
        self.metrics = NodeMetrics(model.names[0], self.kind)
        # Before the weights: a wrong collector must not cost the time to load them.
        requests = EngineRequestMetrics(self.metrics)
        self._telemetry = Telemetry(self.config, requests, role=self.kind, instance=self.engine_id)
        self._resources.push_async_callback(self._telemetry.close)
        plan, limits = self._plan_arena(model)
        loading = self._load(model)
        arena = ArenaMemory(plan.arena_bytes, device=self.config.device)
        self._resources.callback(arena.close)
        self.events: NodeEvents | None = None
        if self.config.kv_events_config.is_published:
            self.events = NodeEvents(self.config, plan, self.engine_id, host=self.host)
            self._resources.callback(self.events.close)
            self.metrics.read(self.events.publisher, counters=EVENT_COUNTERS)
        # While the weights are read: a missing transport must not cost the time to load them.
        self.connector = self._connect(model, plan, arena, max_model_len=limits.max_model_len)
        weights, self.identity = await loading
        if self.events:
            self.events.identify(self.identity.digest)
        runner = ModelRunner(weights, plan, arena)
        await asyncio.to_thread(runner.warm_up, self.config.max_num_seqs)
        self._start_engine(plan, runner, limits)
        self.rpc = await self._start_rpc(model)
        self.connector.advertise(self.rpc.port)
        self.http = await self._start_http(model)
        self._resources.push_async_callback(self._end_requests)
        self.registration = self._register()
        log.info("node serves", engine_id=self.engine_id, url=self.url, grpc_port=self.rpc.port)

    def _load(self, model: ModelFolder) -> asyncio.Future[tuple[CausalLM, ModelIdentity]]:
        """Begins at once, in a thread, which `close` ends at its next read."""
        device = torch.empty(0, device=self.config.device).device
        stop = threading.Event()
        compute = self.config.compute
        load = partial(
            load_and_identify, model.path, model.config, device, compute=compute, stop=stop
        )
        loading = asyncio.get_running_loop().run_in_executor(None, load)

        async def end() -> None:
            stop.set()
            await asyncio.gather(loading, return_exceptions=True)

        self._resources.push_async_callback(end)
        return loading

    @property
    def rpc_url(self) -> str:
        """The gRPC port, as others on the network see it."""
        scheme = "grpc" if self._tls is None else "grpcs"
        return f"{scheme}://{join_host_port(self.host, self.rpc.port)}"

    def _register(self) -> Registration:
        introduction = Introduction(self.engine_id, self.kind, self.rpc_url)
        registration = Registration(introduction, token=self._token, tls=self._tls_to_proxies)
        registration.register_with(self.config.proxy)
        self._resources.push_async_callback(registration.leave)
        return registration

    def _check_options(self) -> None:
        """Raises ConfigError now for what would fail later: models load slowly."""
        config = self.config
        check_device(config.device)
        self._token = token_for_calls(config)
        self._tls = server_tls(config.ssl_certfile, config.ssl_keyfile)
        addresses_here("--host", config.host)
        self.host = advertised_host(config.host, config.advertise_host)
        check_ports(config)
        urls = [parse_node_url(text) for text in config.proxy]
        is_needed = any(url.has_tls for url in urls)
        self._tls_to_proxies = client_tls(config.ssl_ca_certs) if is_needed else None

    def _plan_arena(self, model: ModelFolder) -> tuple[ArenaPlan, EngineLimits]:
        config = self.config
        plan = plan_arena(
            model.config.groups,
            config.block_size,
            config.kv_cache_memory_bytes,
            hash_block_size=config.hash_block_size,
        )
        check_decode_checkpoints(config, plan)
        if config.device == "cpu":
            check_memory(plan)
        max_model_len = context_length(
            config.max_model_len, model.config.max_position_embeddings, plan
        )
        if config.device != "cpu":
            batch = Batch.of(config, max_model_len=max_model_len)
            memory = plan_memory(model.config, read_headers(model.path), plan, batch=batch)
            log.info(memory_report(memory, config.device))
            check_device_memory(memory, config.device)
        log.info(f"arena planned\n{plan_report(plan, max_model_len)}")
        self.metrics.info(
            "vllm:cache_config_info",
            "The KV cache's layout, in labels.",
            {**plan_labels(plan), "enable_prefix_caching": config.enable_prefix_caching},
        )
        vocab_size, eos_token_ids = model.config.vocab_size, model.eos_token_ids
        grammars = GrammarCompiler(model.tokenizer.to_json, vocab_size, eos_token_ids)
        self._resources.push_async_callback(grammars.close)
        self.metrics.read(grammars, gauges=GRAMMAR_GAUGES)
        return plan, EngineLimits(max_model_len, vocab_size, eos_token_ids, grammars)

    def _connect(
        self, model: ModelFolder, plan: ArenaPlan, arena: ArenaMemory, *, max_model_len: int
    ) -> NodeConnector:
        # Engine and identity are made after the connector, which asks for them only once the
        # engine runs.
        parts = NodeParts(
            plan,
            arena,
            self.metrics,
            wake=lambda: self.engine.wake(),
            resources=self._resources,
            engine_id=self.engine_id,
            host=self.host,
            cluster_token=self._token,
            tls=tls_to_peers(self.config),
            identity=lambda: self.identity,
            vocab_size=model.config.vocab_size,
            max_model_len=max_model_len,
            prefix_hash_seed=self.config.prefix_hash_seed,
            tiers=self.events.recorder if self.events else None,
        )
        connector = self._build_connector(parts)
        check_groups(self.config.kv_transfer_config.kv_connector, connector.connector, plan)
        return connector

    def _start_engine(self, plan: ArenaPlan, runner: ModelRunner, limits: EngineLimits) -> None:
        config, connector = self.config, self.connector.connector
        recorder = self.events.recorder if self.events else None
        every: Sequence[CacheListener | None] = (connector.scheduler.cache_listener, recorder)
        heard_by = [listener for listener in every if listener is not None]
        cache = KVCacheManager(
            plan,
            hash_seed=config.prefix_hash_seed,
            prefix_caching=config.enable_prefix_caching,
            checkpoint_share=config.mamba_checkpoint_share,
            listener=CacheListeners(heard_by) if len(heard_by) > 1 else next(iter(heard_by), None),
        )
        scheduler = Scheduler(scheduler_config(config), cache, connector.scheduler)
        self.metrics.read(scheduler, gauges=SCHEDULER_GAUGES, counters=SCHEDULER_COUNTERS)
        after_step = self.events.publish if self.events else None
        core = EngineCore(scheduler, runner, connector, after_step=after_step)
        self.metrics.read_counts(
            "vllm:iteration_tokens_total", "Tokens of a step.", STEP_BUCKETS, read=core.rates.sizes
        )
        self._telemetry.start(
            lambda: {
                "num_requests_running": scheduler.num_running,
                "num_requests_waiting": scheduler.num_waiting,
                "kv_cache_usage": round(scheduler.cache.usage, 3),
            }
        )
        # Known before it starts: its connector may wake it from then on.
        self.engine = AsyncEngine(
            core, connector.admission, limits, recording=self._telemetry.records.recording
        )
        self.engine.start()
        self._resources.push_async_callback(self.engine.close)

    async def _start_rpc(self, model: ModelFolder) -> RpcServer:
        reset = self._reset_cache if self.config.enable_reset_prefix_cache else None
        node = NodeService(self.engine, lambda: self._describe(model), model.files, reset=reset)
        rpc = await start_server(
            [node, *self.connector.services()],
            self.config.host,
            self.config.grpc_port,
            token=self._token,
            tls=self._tls,
        )
        # Pushed in reverse: `drain` runs before `close`.
        self._resources.push_async_callback(rpc.close)
        self._resources.push_async_callback(rpc.drain, END_OF_REQUESTS_S)
        return rpc

    async def _start_http(self, model: ModelFolder) -> HttpServer:
        config = self.config
        served = ServedModel(
            served_model_names=model.names,
            max_model_len=self.engine.limits.max_model_len,
            vocab_size=model.config.vocab_size,
            tokenizer=model.tokenizer,
            defaults=model.defaults,
            accept_kv_transfer_params=True,
            root=config.model,
        ).with_options(config)
        app = create_app(
            self.engine,
            served,
            access=access_of(config),
            metrics_registry=self.metrics.registry,
            routes=[reset_route(self._reset_cache)] if config.enable_reset_prefix_cache else [],
            open_routes=[Route("/node_info", self._node_info)],
        )
        http = HttpServer(
            app,
            config.host,
            config.port,
            drain_timeout_s=END_OF_REQUESTS_S,
            tls=self._tls,
            limits=ConnectionLimits(keep_alive_timeout_s=config.timeout_keep_alive),
        )
        await http.start()
        self._resources.push_async_callback(http.close)
        return http

    async def _reset_cache(self) -> None:
        """Raises UnavailableError while some of the cache is in use."""

        def reset() -> None:
            self.engine.core.scheduler.reset_prefix_cache()
            if self.events is not None:
                self.events.recorder.cleared()

        await self.engine.between_steps(reset)
        log.info("the prefix cache was reset")

    async def _end_requests(self) -> None:
        """Clients that still listen learn that their answer is not whole."""
        self.engine.end_open()
        await wait_until(lambda: not self.engine.num_open, END_OF_REQUESTS_S)

    async def _node_info(self, request: Request) -> Response:
        """Tells a proxy that knows only the HTTP port where the token streams are.

        Everybody may ask: a scan of the ports would tell as much.
        """
        told = {"grpc_port": self.rpc.port, "engine_id": self.engine_id}
        return JSONResponse({**told, "kind": self.kind, "host": self.host})

    def _describe(self, model: ModelFolder) -> NodeInfo:
        scheduler, rates = self.engine.core.scheduler, self.engine.core.rates
        plan = scheduler.cache.plan
        return NodeInfo(
            engine_id=self.engine_id,
            kind=self.kind,
            model_names=model.names,
            max_model_len=self.engine.limits.max_model_len,
            vocab_size=model.config.vocab_size,
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.cache.usage,
            ready=not self.engine.problem,
            reason=self.engine.problem,
            hand_over_problems=self.engine.hand_over_problems,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            prefill_tokens_per_s=rates.prefill.per_s,
            decode_tokens_per_s=rates.decode.per_s,
            link_bytes_per_s=self.connector.link_bytes_per_s(),
            kv_bytes_per_token=plan.kv_bytes_per_token,
            state_bytes=plan.state_bytes,
            kv_events=self.events.info if self.events else None,
            num_requests_loading=len(scheduler.loads),
            num_held=scheduler.num_held,
            arena=ArenaUse(**scheduler.cache.units_by_use),
            prefix_query_tokens=scheduler.stats.prefix_queries,
            prefix_hit_tokens=scheduler.stats.prefix_hits,
            root=self.config.model,
            model_identity=self.identity.digest,
        )
