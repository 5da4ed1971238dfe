"""The options of the proxy, from flags or a YAML file with the same keys. Reads no environment."""

import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta

from engine.errors import ConfigError
from proxy.backends.connect import WorkerOptions
from proxy.backends.worker import Backend, WorkerUrl
from proxy.backends.worker_facts import parse_event_endpoints
from proxy.routing.local_prefill import Threshold
from proxy.routing.policies import POLICIES
from serving.config import ListenPort, NotNegative, Positive, Seconds, ServerConfig
from serving.rpc.address import is_loopback

NODE_URL: Final = (
    "http://host:port (its HTTP port) or grpc://host:port, with TLS https:// or grpcs://, or "
    "another engine's worker, vllm+http://host:port; repeat for several."
)


class ProxyConfig(ServerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One proxy, flag for flag."""

    prefill: Annotated[tuple[str, ...], Meta(description=f"A prefill node: {NODE_URL}")] = ()
    decode: Annotated[tuple[str, ...], Meta(description=f"A decode node: {NODE_URL}")] = ()
    backend: Annotated[
        Literal["tandem", "vllm", "sglang"],
        Meta(description="Engine of the nodes whose URL names none: tandem, vllm or sglang."),
    ] = "tandem"
    backend_api_key: Annotated[
        str | None, Meta(description="Key that workers of other engines ask for.")
    ] = None
    tokenizer: Annotated[
        str | None,
        Meta(
            description="Model folder or hub name with the tokenizer of other engines' workers. "
            "Default: the model that they name."
        ),
    ] = None
    kv_events_endpoint: Annotated[
        tuple[str, ...],
        Meta(
            description="Where a worker that does not tell it publishes KV events: "
            "http://host:port=tcp://host:port, and after a comma its replay endpoint; repeat for "
            "several."
        ),
    ] = ()
    grpc_port: Annotated[
        ListenPort | None,
        Meta(
            description="Port on which nodes register with this proxy (their --proxy), 0 for any. "
            "Default: none, and the nodes are those given here."
        ),
    ] = None
    routing_policy: Annotated[str, Meta(description=f"One of {', '.join(sorted(POLICIES))}.")] = (
        "prefix_aware"
    )
    disagg_threshold: Annotated[
        str | int,
        Meta(
            description="A prompt of which the decode node lacks fewer tokens is prefilled there: "
            "a number, 0 for never, or auto, where that is sooner by the nodes' measured rates."
        ),
    ] = "0"
    enable_routing_details: Annotated[
        bool, Meta(description="Tell clients in `usage` which nodes served a request, and why.")
    ] = False
    api_keys_file: Annotated[
        str | None,
        Meta(
            description="YAML or JSON with the keys of several clients, their limits and policies "
            "(docs/operations.md); read again when it changes."
        ),
    ] = None
    max_concurrent_requests: Annotated[
        NotNegative,
        Meta(
            description="Sequences that the cluster works on at once; more wait here, and tenants "
            "take turns. 0: any number."
        ),
    ] = 0
    queue_size: Annotated[Positive, Meta(description="Requests that may wait for their turn.")] = (
        1024
    )
    queue_timeout: Annotated[
        Seconds, Meta(description="Seconds that a request may wait for its turn.")
    ] = 60.0
    request_timeout: Annotated[
        Seconds, Meta(description="Seconds that one request may take in all.")
    ] = 600.0
    first_token_timeout: Annotated[
        Seconds, Meta(description="Seconds until a node's first token.")
    ] = 120.0
    inter_token_timeout: Annotated[
        Seconds,
        Meta(
            description="Seconds between a node's tokens, and for which an answer that has begun "
            "waits for a decode node to come back."
        ),
    ] = 60.0

    @property
    def threshold(self) -> Threshold:
        """`disagg_threshold` as `LocalPrefill` takes it."""
        return "auto" if self.disagg_threshold == "auto" else int(self.disagg_threshold)

    @property
    def workers(self) -> tuple[list[WorkerUrl], list[WorkerUrl]]:
        """The URLs of `prefill` and `decode`. Raises ConfigError for one that is wrong."""
        urls = [
            [WorkerUrl.parse(it, Backend(self.backend)) for it in kind]
            for kind in (self.prefill, self.decode)
        ]
        return urls[0], urls[1]

    @property
    def worker_options(self) -> WorkerOptions:
        """Options of the workers. Raises ConfigError for addresses of events that are wrong."""
        events = dict(map(parse_event_endpoints, self.kv_events_endpoint))
        return WorkerOptions(self.cluster_token, self.backend_api_key, self.tokenizer, events)

    def check(self) -> None:
        if not self.decode and self.grpc_port is None:
            raise ConfigError(
                "no decode node: give at least one --decode URL, or --grpc-port for nodes that "
                "register"
            )
        if self.grpc_port is not None and self.cluster_token is None:
            has_keys = self.api_key is not None or self.api_keys_file is not None
            if has_keys or not is_loopback(self.host):
                why = "it has API keys" if has_keys else f"it listens on {self.host}"
                raise ConfigError(
                    f"--grpc-port: whoever registers gets prompts, and {why}: give --cluster-token"
                )
        workers = [*self.workers[0], *self.workers[1]]
        urls = [it.url.text for it in workers]
        for url in urls:
            if urls.count(url) > 1:
                raise ConfigError(f"node {url} is named twice")
        self._check_backends(workers)
        if self.routing_policy not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise ConfigError(f"--routing-policy {self.routing_policy!r} is none of: {known}")
        if not re.fullmatch("auto|[0-9]{1,9}", str(self.disagg_threshold)):
            raise ConfigError(
                f"--disagg-threshold {self.disagg_threshold!r} is no number of tokens, nor auto"
            )

    def _check_backends(self, workers: Sequence[WorkerUrl]) -> None:
        backends = {it.backend: it for it in workers}
        if len(backends) > 1:
            named = " and ".join(f"{it.text} ({backend})" for backend, it in backends.items())
            raise ConfigError(
                f"nodes of one engine each: {named} cannot take each other's prefills"
            )
        if Backend.SGLANG in backends:
            if not self.prefill and self.grpc_port is None:
                raise ConfigError("SGLang's decode workers compute no prompts: give --prefill")
            if str(self.disagg_threshold) != "0":
                raise ConfigError(
                    "--disagg-threshold: SGLang's decode workers compute no prompts; leave it out"
                )
        unknown = self.worker_options.events.keys() - {it.url.text for it in workers}
        if unknown and self.grpc_port is None:
            raise ConfigError(f"--kv-events-endpoint names {min(unknown)}, which is no worker")
