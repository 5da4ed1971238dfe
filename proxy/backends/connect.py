"""From a worker's URL to the client of its backend."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.backends.http_worker import HttpWorker
from proxy.backends.sglang import SglangWorker
from proxy.backends.tandem import TandemNode
from proxy.backends.vllm import VllmWorker
from proxy.backends.worker import Backend, Worker, WorkerUrl
from proxy.backends.worker_facts import EventEndpoints
from serving.tls import ClientTls


@dataclass(slots=True, frozen=True)
class WorkerOptions:
    """Options that all workers share. `token`: of this project's nodes; `api_key`: of the others.

    `tokenizer`: the folder of the workers' model, None for the one that they name. `events`: by URL
    of a worker the addresses of its KV events, where it does not tell them.
    """

    token: str | None = None
    api_key: str | None = None
    tokenizer: str | None = None
    events: Mapping[str, EventEndpoints] = field(default_factory=dict)


def connect(url: WorkerUrl, options: WorkerOptions, tls: ClientTls | None) -> Worker:
    """The client of a worker, which is not reached yet. `tls`: for those that speak it."""
    if url.backend is Backend.TANDEM:
        return TandemNode(url.url, token=options.token, tls=tls)
    http = HttpWorker(url.url, api_key=options.api_key, tls=tls)
    kind = VllmWorker if url.backend is Backend.VLLM else SglangWorker
    return kind(http, tokenizer=options.tokenizer, events=options.events.get(url.url.text))
