"""ucxx's core with typed errors and plain arguments: tagged messages between two UCX workers.

Knows no arenas, spans or frames. ucxx 0.52 has one-sided reads in C++ only, so its Python core
leaves tagged messages; and it cancels no single request, so whoever gives up closes the worker.
"""

import importlib
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.distribution import how_to_install
from engine.errors import ConfigError, TransportError
from serving.hosts import ipv4_of

Bytes = npt.NDArray[np.uint8]

# UCX's own 8 KiB segments move 1.4 GB/s over loopback TCP where these move 2 to 4. TCP has no puts
# for messages, so this scheme also spares it the round trip of a rendezvous; RDMA keeps its own.
# What else was tried stands in benchmarks/pages/transfer.md.
_SETTINGS = {"TCP_TX_SEG_SIZE": "1M", "TCP_RX_SEG_SIZE": "1M", "RNDV_SCHEME": "put_zcopy"}
_INFINIBAND = Path("/sys/class/infiniband")
_CLOSE_NS = 10_000_000
_CLOSE_ATTEMPTS = 20


@dataclass(slots=True, frozen=True)
class Request:
    """A message under way; the request keeps its buffer alive."""

    handle: Any
    buffer: Bytes


class UcxWorker:
    """One UCX context and worker, at `host` only; not thread-safe. ConfigError without ucxx."""

    def __init__(self, host: str) -> None:
        try:  # heavy and optional, so not imported at the top of the file
            self._ucx = importlib.import_module("ucxx._lib.libucxx")
            self._array = importlib.import_module("ucxx._lib.arr").Array
        except ImportError as error:
            raise ConfigError(
                f"the ucx transport needs the ucxx package ({error}): {how_to_install('ucx')}"
            ) from error
        self._errors = (self._ucx.UCXError, RuntimeError, ValueError)
        self._endpoints: list[Any] = []
        feature = self._ucx.Feature
        with self._typed("open a worker"):
            settings = _SETTINGS | {"NET_DEVICES": network_devices(host)}
            context = self._ucx.UCXContext(settings, (feature.TAG, feature.WAKEUP))
            self._worker: Any = self._ucx.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
        self.event_fd = int(self._worker.epoll_file_descriptor)

    @contextmanager
    def _typed(self, action: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransportError(f"ucx could not {action}: {error}") from error

    def address(self) -> bytes:
        """The address for another worker's `connect`."""
        with self._typed("describe itself"):
            return bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> Any:
        """Start connecting; the endpoint is `alive` until UCX has seen the other side go.

        `address` is parsed by UCX itself: take it from trusted peers only.
        """
        with self._typed("connect"):
            remote = self._ucx.UCXAddress.create_from_buffer(address)
            endpoint = self._ucx.UCXEndpoint.create_from_worker_address(self._worker, remote, True)
        self._endpoints.append(endpoint)
        return endpoint

    def disconnect(self, endpoint: Any) -> None:
        """Close by force: what was under way fails."""
        self._endpoints.remove(endpoint)
        with self._typed("disconnect"):
            endpoint.close_blocking(_CLOSE_NS, _CLOSE_ATTEMPTS)

    def send(self, endpoint: Any, message: Bytes, tag: int) -> Request:
        """Start sending; `message` must not change before it is done."""
        with self._typed("send"):
            tagged = self._ucx.UCXXTag(tag)
            return Request(endpoint.tag_send(self._array(message), tagged), message)

    def receive(self, buffer: Bytes, tag: int | None) -> Request:
        """Receive a message of `tag`, None: the next of any; one longer than `buffer` fails."""
        with self._typed("receive"):
            array, tagged = self._array(buffer), self._ucx.UCXXTag(tag or 0)
            if tag is not None:
                return Request(self._worker.tag_recv(array, tagged), buffer)
            return Request(self._worker.tag_recv(array, tagged, self._ucx.UCXXTagMask(0)), buffer)

    def is_done(self, request: Request) -> bool:
        """True once it has ended well. Raises TransportError if it failed."""
        if not request.handle.completed:
            return False
        with self._typed("move a message"):
            request.handle.check_error()
        return True

    def progress(self) -> None:
        """Do all that can be done now, without the GIL."""
        with self._typed("progress"):
            self._worker.progress()

    def arm(self) -> bool:
        """True: nothing can be done until `event_fd` is readable. Right after `progress`."""
        with self._typed("wait"):
            return bool(self._worker.arm())

    def close(self) -> None:
        """Give the worker and its connections back; afterwards no byte arrives. Idempotent."""
        while self._endpoints:
            self.disconnect(self._endpoints[-1])
        if self._worker is not None:
            with self._typed("cancel its requests"):
                self._worker.cancel_inflight_requests(_CLOSE_NS, _CLOSE_ATTEMPTS)
        self._worker = None


def wait_readable(fds: Sequence[int], timeout_s: float) -> bool:
    """Return True once one of `fds` is readable, False after `timeout_s` seconds."""
    events = select.poll()  # not select.select, which knows no descriptor beyond 1,023
    for fd in fds:
        events.register(fd, select.POLLIN)
    return bool(events.poll(timeout_s * 1e3))


def network_devices(host: str) -> str:
    """The devices that UCX may use, by comma: the interface of `host`, and RDMA ports beside it.

    On loopback no RDMA ports. Raises ConfigError if no interface has it as its first address: UCX
    takes the name of an interface and listens at its first, which nobody may have meant.
    """
    try:
        wanted = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"ucx cannot listen on {host!r}: {error}") from error
    names = [name for _, name in socket.if_nameindex() if ipv4_of(name) == wanted]
    if wanted.startswith("127."):
        names = ["lo"]
    elif names and _INFINIBAND.is_dir():
        ports = sorted(_INFINIBAND.glob("*/ports/*"))
        names += [f"{port.parents[1].name}:{port.name}" for port in ports]
    if not names:
        raise ConfigError(
            "UCX listens at the first IPv4 address of a network interface, and none of this "
            f"machine has {wanted} ({host}) as its first: choose auto or zmq, or another --host"
        )
    return ",".join(names)
