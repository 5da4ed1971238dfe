"""The proxy, assembled: nodes, routing, flow, OpenAI surface; and its life from start to close."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Final

import structlog
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from engine.api.app import create_app
from engine.api.serving import Serving
from engine.http.server import HttpServer
from engine.process import wait_until
from engine.rpc.address import join_host_port
from engine.rpc.client import StreamDeadlines
from engine.tls import client_tls, server_tls
from proxy.cluster.node import NodeKind
from proxy.cluster.node_pool import POLL_INTERVAL_S, NodePool
from proxy.cluster.node_url import parse_node_url
from proxy.config import ProxyConfig
from proxy.front_door import FrontDoor
from proxy.legs import Legs
from proxy.measured import MeasuredGenerator
from proxy.metrics import ProxyMetrics
from proxy.model_loader import load_serving
from proxy.pd_flow import PdFlow
from proxy.routing.policy import POLICIES

END_OF_REQUESTS_S: Final = 2.0
"""For the last bytes of requests that have ended."""

log = structlog.get_logger()


class ProxyServer:
    """Start it, `wait` or do other things, `close` it. All runs on the caller's event loop."""

    def __init__(self, config: ProxyConfig, *, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        self._config = config
        self._tls = server_tls(config.ssl_certfile, config.ssl_keyfile)
        self._metrics = ProxyMetrics(CollectorRegistry())
        self._pool = _make_pool(config, poll_interval_s)
        for kind in NodeKind:
            count = partial(self._pool.num_available, kind)
            self._metrics.available_nodes.labels(kind).set_function(count)
        self._flow = _make_flow(config, self._pool, self._metrics)
        self._door = FrontDoor(self._metrics.registry)
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._http: HttpServer | None = None
        self._opening: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound HTTP port; the configured one before `start`."""
        return self._config.port if self._http is None else self._http.port

    @property
    def url(self) -> str:
        """Base URL of the HTTP server."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{join_host_port(self._config.host, self.port)}"

    async def start(self) -> None:
        """Returns when HTTP is answered; nodes may come later. ConfigError for a taken port."""
        config = self._config
        self._http = HttpServer(
            self._door,
            config.host,
            config.port,
            drain_timeout_s=END_OF_REQUESTS_S,
            tls=self._tls,
        )
        await self._http.start()
        self._pool.start(self._on_task_end)
        self._opening = asyncio.create_task(self._open())
        self._opening.add_done_callback(self._on_task_end)

    async def wait(self) -> None:
        """Returns when the proxy was closed, or raises what broke one of its own tasks."""
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    async def drain(self) -> None:
        """Refuses new requests; returns when none is under way, or after `--drain-timeout`."""
        self._flow.refuse_new()
        log.info("proxy drains", num_requests=self._flow.num_open)
        await wait_until(lambda: not self._flow.num_open, self._config.drain_timeout)

    async def close(self) -> None:
        """Ends what is under way with an error, then gives up HTTP and nodes."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        self._flow.end_open()
        await wait_until(lambda: not self._flow.num_open, END_OF_REQUESTS_S)
        if self._http is not None:
            await self._http.close()
        await self._flow.close()
        await self._pool.close()
        self._stop.set()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A proxy that no longer watches its nodes must not look alive."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._stop.set()

    async def _open(self) -> None:
        """Serves as soon as the model is known, and within the context that decode nodes have."""
        serving = replace(
            await load_serving(self._pool, self._config.served_model_name),
            enable_prompt_tokens_details=self._config.enable_prompt_tokens_details,
        )
        generator = MeasuredGenerator(self._flow, self._metrics, serving.model_name)
        self._door.open(self._app(generator, serving))
        log.info("proxy serves", url=self.url)
        while True:
            await self._pool.wait_for_news(POLL_INTERVAL_S)
            context = self._pool.max_model_len or serving.max_model_len
            if context != serving.max_model_len:
                serving = replace(serving, max_model_len=context)
                self._door.open(self._app(generator, serving))

    def _app(self, generator: MeasuredGenerator, serving: Serving) -> ASGIApp:
        return create_app(
            generator,
            serving,
            metrics_registry=self._metrics.registry,
            api_key=self._config.api_key,
            accept_kv_transfer_params=False,
        )


def _make_pool(config: ProxyConfig, poll_interval_s: float) -> NodePool:
    prefill = [parse_node_url(text) for text in config.prefill]
    decode = [parse_node_url(text) for text in config.decode]
    is_needed = config.ssl_ca_certs is not None or any(url.has_tls for url in (*prefill, *decode))
    return NodePool(
        prefill,
        decode,
        token=config.cluster_token,
        tls=client_tls(config.ssl_ca_certs) if is_needed else None,
        poll_interval_s=poll_interval_s,
    )


def _make_flow(config: ProxyConfig, pool: NodePool, metrics: ProxyMetrics) -> PdFlow:
    deadlines = StreamDeadlines(
        total_s=config.request_timeout,
        first_output_s=config.first_token_timeout,
        next_output_s=config.inter_token_timeout,
    )
    return PdFlow(
        pool,
        POLICIES[config.routing_policy](),
        Legs(deadlines, metrics, policy_name=config.routing_policy),
        metrics=metrics,
        request_timeout_s=config.request_timeout,
    )
