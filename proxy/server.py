"""The proxy assembled from nodes, flow and OpenAI API, and its life from start to close."""

import asyncio
import secrets
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import UnavailableError
from proxy.access.fair_queue import FairQueue
from proxy.access.gate import Gate
from proxy.access.key_file import KeyFile
from proxy.cluster.node import Node, NodeKind
from proxy.cluster.node_pool import POLL_INTERVAL_S, NodePool
from proxy.config import ProxyConfig
from proxy.members import Members
from proxy.metrics import REQUEST_GAUGES, EventMetrics, ProxyMetrics
from proxy.model_loader import load_serving
from proxy.pd_flow import PdFlow
from proxy.routing.event_sources import EventSources
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.router import Router
from proxy.status import ClusterStatus
from proxy.warming import Warming
from serving.api.access import Access
from serving.api.app import create_app, middleware_of
from serving.api.chat_template import given_template
from serving.api.operations import HEALTH_PATHS, PROBE_PATHS, metrics, reset_route
from serving.http.connection import ConnectionLimits
from serving.http.errors import ERROR_HANDLERS
from serving.http.server import HttpServer
from serving.process import wait_until
from serving.rpc.address import join_host_port
from serving.rpc.client import StreamDeadlines
from serving.rpc.server import RpcServer, start_server
from serving.telemetry.request_metrics import RequestMetrics
from serving.telemetry.telemetry import Telemetry
from serving.tls import client_tls, server_tls

ANY_METHOD: Final = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
END_OF_REQUESTS_S: Final = 2.0
"""For the last bytes of requests that have ended."""

log = structlog.get_logger()


class ProxyServer:
    """Start it, `wait` or do other things, `close` it. All runs on the caller's event loop.

    `instance` names this life of the proxy.
    """

    def __init__(self, config: ProxyConfig, *, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        self._config = config
        self._poll_interval_s = poll_interval_s
        self._tls = server_tls(config.ssl_certfile, config.ssl_keyfile)
        # Now, although nodes are asked for the rest: a wrong option must end the start.
        self._template = given_template(config.chat_template)
        self._metrics = ProxyMetrics(CollectorRegistry())
        self._pool = _make_pool(config, poll_interval_s)
        for kind in NodeKind:
            count = partial(self._pool.num_available, kind)
            self._metrics.available_nodes.labels(kind).set_function(count)
            resting = partial(self._pool.num_resting, kind)
            self._metrics.resting_nodes.labels(kind).set_function(resting)
        self.instance = f"proxy-{secrets.token_hex(8)}"
        self._telemetry = Telemetry(config, role="proxy", instance=self.instance)
        self._warming = Warming(self._pool)
        self._members = Members(self._pool, self._warming, ca_certs=config.ssl_ca_certs)
        self._rpc: RpcServer | None = None
        index = PrefixIndex()
        router = Router(config.routing_policy, index, disagg_threshold=config.threshold)
        self._events = EventSources(index, on_loss=router.forget)
        events = EventMetrics(self._pool.label_of, lambda: index.num_entries, self._events.stats)
        self._metrics.registry.register(events)
        self._flow = PdFlow(
            self._pool,
            router,
            StreamDeadlines(
                total_s=config.request_timeout,
                first_output_s=config.first_token_timeout,
                next_output_s=config.inter_token_timeout,
            ),
            metrics=self._metrics,
            records=self._telemetry.records,
            tells_routes=config.enable_routing_details,
        )
        self._queue = queue = FairQueue(
            config.max_concurrent_requests, config.queue_size, timeout_s=config.queue_timeout
        )
        self._gate = Gate(config.api_key, queue, self._metrics)
        self._metrics.waiting_requests.set_function(lambda: queue.num_waiting)
        self._status = ClusterStatus(
            self._pool,
            self._warming,
            records=self._telemetry.records,
            metrics=self._metrics,
            event_stats=self._events.stats,
            num_waiting=lambda: self.num_waiting,
        )
        # Neither holds a secret: everybody may ask.
        self._open_routes = [self._status.page_route]
        if config.grpc_port is not None:
            self._open_routes.append(Route("/node_info", self._node_info))
        self._app: ASGIApp = self._waiting_app()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """The bound HTTP port; the configured one before `start`."""
        return self._config.port if self._http is None else self._http.port

    @property
    def url(self) -> str:
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{join_host_port(self._config.host, self.port)}"

    @property
    def knows_model(self) -> bool:
        """True once a node has told the model: until then every request gets a 503."""
        return bool(self._metrics.model_name)

    @property
    def rpc_url(self) -> str:
        """Where nodes register; empty if they cannot."""
        scheme = "grpc" if self._tls is None else "grpcs"
        port = 0 if self._rpc is None else self._rpc.port
        return f"{scheme}://{join_host_port(self._config.host, port)}" if port else ""

    @property
    def nodes(self) -> tuple[tuple[Node, str], ...]:
        """Every node that it knows, and why it cannot be used; empty if nothing is wrong."""
        return tuple(
            (node, node.problem or self._warming.problem_of(node)) for node in self._pool.nodes
        )

    @property
    def num_running(self) -> int:
        """Requests that have had their turn and are not over."""
        return len(self._telemetry.records.open)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._queue.num_waiting

    def missing(self) -> tuple[str, ...]:
        """The reasons, in words, why the proxy cannot use every node that it knows yet."""
        problems = (f"{it.name}: {it.problem}" for it in self._pool.nodes if not it.is_available)
        return (*problems, *(() if self._metrics.model_name else ("a model",)))

    async def start(self) -> None:
        """Returns when HTTP is served; nodes may come later. ConfigError for a taken port."""
        config = self._config
        if config.api_keys_file is not None:
            # Before anybody can connect: no moment may be open to everybody.
            keys = KeyFile(Path(config.api_keys_file), self._poll_interval_s)
            self._gate.set_keys(await keys.read())
            self._run(keys.watch(self._gate.set_keys))

        # A function, since uvicorn takes a bound method for an ASGI 2 app.
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, receive, send)

        self._http = HttpServer(
            app,
            config.host,
            config.port,
            drain_timeout_s=END_OF_REQUESTS_S,
            tls=self._tls,
            limits=ConnectionLimits(keep_alive_timeout_s=config.timeout_keep_alive),
        )
        await self._http.start()
        self._pool.start(
            self._on_task_end, on_answer=self._events.follow, on_gone=self._events.forget
        )
        if config.grpc_port is not None:
            self._rpc = await start_server(
                [self._members],
                config.host,
                config.grpc_port,
                token=config.cluster_token,
                tls=self._tls,
            )
            self._run(self._members.watch())
            log.info("nodes may register", url=self.url, grpc_port=self._rpc.port)
        self._run(self._warming.watch())
        self._run(self._open())
        self._telemetry.start(lambda: {"num_waiting": self.num_waiting})

    async def wait(self) -> None:
        """Returns when the proxy is closed, or raises the error of one of its own tasks."""
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    async def drain(self) -> None:
        """Refuses new requests; returns when none is under way, or after `--drain-timeout`."""
        self._flow.refuse_new()
        log.info("proxy drains", num_requests=self._flow.num_open)
        await wait_until(lambda: not self._flow.num_open, self._config.drain_timeout)

    async def close(self) -> None:
        """Ends the requests under way with an error, then closes HTTP and nodes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._rpc is not None:
            await self._rpc.close()
        await self._warming.close()
        self._flow.end_open()
        await wait_until(lambda: not self._flow.num_open, END_OF_REQUESTS_S)
        if self._http is not None:
            await self._http.close()
        await self._pool.close()
        await self._telemetry.close()
        # Joins the subscriber's thread, and the pool's watchers add no source any more.
        await asyncio.to_thread(self._events.close)
        self._stop.set()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """`work` in a task of its own, until the proxy is closed."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Ends a proxy that has stopped to watch its nodes: it must not look alive."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._stop.set()

    async def _open(self) -> None:
        """Serves as soon as the model is known; follows the longest context of the decode nodes."""
        loaded = await load_serving(self._pool, self._config, self._template)
        served = loaded.with_options(self._config)
        of_model = self._metrics.of_model(served.model_name)
        of_model.read(self, gauges=REQUEST_GAUGES)
        self._telemetry.records.readers.append(RequestMetrics(of_model))
        log.info("proxy serves", url=self.url)
        routes = [self._status.status_route]
        if self._config.enable_reset_prefix_cache:
            routes.append(reset_route(self._pool.reset_prefix_caches))
        while True:
            self._app = create_app(
                self._flow,
                served,
                metrics_registry=self._metrics.registry,
                access=self._access(),
                routes=routes,
                open_routes=self._open_routes,
                stages=self._members.stages,
            )
            # The app holds `max_model_len`, so a new one is made when a decode node changes it.
            context = served.max_model_len
            while context == served.max_model_len:
                await self._pool.wait_for_news(POLL_INTERVAL_S)
                context = self._pool.max_model_len or context
            served = replace(served, max_model_len=context)

    def _waiting_app(self) -> Starlette:
        """The HTTP app before the model is known: alive and measured, but not ready."""

        async def alive(request: Request) -> Response:
            return Response()

        async def not_yet(request: Request) -> Response:
            raise UnavailableError("no node has answered yet, so the model is not known")

        open_paths = {*PROBE_PATHS, *(route.path for route in self._open_routes)}
        return Starlette(
            routes=[
                *(Route(path, alive) for path in HEALTH_PATHS),
                Route("/metrics", partial(metrics, self._metrics.registry)),
                *self._open_routes,
                self._status.status_route,
                Route("/{path:path}", not_yet, methods=ANY_METHOD),
            ],
            middleware=middleware_of(self._access(), open_paths),
            exception_handlers=ERROR_HANDLERS,
        )

    async def _node_info(self, request: Request) -> Response:
        """Tells nodes that know only the HTTP port where they register, as nodes tell proxies."""
        if self._rpc is None:
            raise UnavailableError("nodes cannot register yet")
        told = {"grpc_port": self._rpc.port, "engine_id": self.instance}
        return JSONResponse({**told, "kind": "proxy", "host": self._config.host})

    def _access(self) -> Access:
        config = self._config
        has_keys = config.api_key is not None or config.api_keys_file is not None
        return Access(self._gate if has_keys else None, self._gate, config.allowed_origins)


def _make_pool(config: ProxyConfig, poll_interval_s: float) -> NodePool:
    prefill, decode = config.workers
    # Reading the machine's authorities takes time and may fail: only if a node has TLS.
    has_tls = any(it.url.has_tls for it in (*prefill, *decode))
    return NodePool(
        prefill,
        decode,
        options=config.worker_options,
        tls=client_tls(config.ssl_ca_certs) if has_tls or config.ssl_ca_certs else None,
        is_open=config.grpc_port is not None,
        poll_interval_s=poll_interval_s,
    )
