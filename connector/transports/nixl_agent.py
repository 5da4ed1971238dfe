"""NIXL's bindings with one UCX backend, typed errors and plain arguments. Knows no peers or arenas.

Not NIXL's own `nixl_agent` class: that one fixes the progress thread's delay at 0, so that an idle
process spins on a whole core, and serialises descriptors with pickle.
"""

import importlib
import secrets
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec

from connector.transports.address import Nbytes, PerRegion
from engine.distribution import how_to_install
from engine.errors import ConfigError, TransportError

_PROGRESS_DELAY_US = 5000  # how long the progress thread sleeps when no event wakes it


class NixlRegion(msgspec.Struct, frozen=True):
    """Registered memory of a peer: address of byte 0, bytes, kind, index of its device."""

    base: Nbytes
    nbytes: Nbytes
    memory: Literal["DRAM", "VRAM"]
    device: Annotated[int, msgspec.Meta(ge=0, lt=1024)]


class NixlAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="nixl"):
    """A peer's agent and memory. Descriptors are built here from base + offset, never received."""

    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=64 * 1024)]
    regions: Annotated[tuple[NixlRegion, ...], PerRegion]


class NixlAgent:
    """One NIXL agent with its registered regions; not thread-safe. Raises ConfigError without nixl.

    Its own name begins with `name`: NIXL refuses new metadata under a name that it knows.
    `progress_thread`: needed to answer peers over TCP while nobody calls. An agent that only reads
    is about twice as fast without it: the thread fights the caller for the UCX worker. `devices`:
    the only ones that UCX uses and listens on, by comma (`ucx_worker.network_devices`).
    """

    def __init__(
        self,
        name: str,
        regions: Sequence[NixlRegion] = (),
        *,
        progress_thread: bool,
        devices: str,
        bindings: ModuleType | None = None,
    ) -> None:
        self._nixl = bindings or load_nixl()
        # NIXL's errors share no base class but Exception.
        named = [kind for name, kind in vars(self._nixl).items() if name.endswith("Error")]
        self._typed = partial(_Typed, (RuntimeError, *named))
        self.name = f"{name}-{secrets.token_hex(8)}"
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        with self._typed("open the UCX backend"):
            self._agent: Any = self._nixl.nixlAgent(self.name, config)
            # `peer`: UCX reports a peer that vanished instead of waiting for it for ever.
            options = {"ucx_error_handling_mode": "peer"}
            # One option cuts its value at the first comma, so it takes one device, the interface.
            # The other takes many, and appends `:1` to the last, which must be the first port of an
            # RDMA device.
            if devices.endswith(":1"):
                options["device_list"] = devices.removesuffix(":1")
            else:
                options["engine_config"] = f"NET_DEVICES={devices}"
            backend = self._agent.createBackend("UCX", options)
        self._backends = [backend]
        self.regions: list[NixlRegion] = []
        self._registered: list[Any] = []
        for region in regions:
            self.register(region)

    def register(self, region: NixlRegion) -> None:
        """Pin one more region."""
        segment, descriptor = self._segment(region.memory), (region.base, region.nbytes)
        registered = self._nixl.nixlRegDList(segment, [(*descriptor, region.device, "")])
        with self._typed(f"register {region.nbytes} B of {region.memory}"):
            self._agent.registerMem(registered, self._backends)
        self.regions.append(region)
        self._registered.append(registered)

    @property
    def address(self) -> bytes:
        """A NixlAddress of all regions, encoded: what a peer needs to read from them."""
        with self._typed("describe itself"):
            metadata = bytes(self._agent.getLocalMD())
        return msgspec.msgpack.encode(NixlAddress(self.name, metadata, tuple(self.regions)))

    def load(self, metadata: bytes, name: str) -> None:
        """Make a remote agent known and start connecting. Refuses metadata of any other agent."""
        with self._typed(f"load the metadata of {name}"):
            loaded = self._agent.loadRemoteMD(metadata)
            loaded = loaded.decode(errors="replace") if isinstance(loaded, bytes) else loaded
            if loaded != name:
                self._agent.invalidateRemoteMD(loaded)
                raise TransportError(f"the address of {name} carries the metadata of {loaded}")

    def unload(self, name: str) -> None:
        """Forget a remote agent and close its connection, letting reads under way finish."""
        with self._typed(f"disconnect {name}"):
            self._agent.invalidateRemoteMD(name)

    def prepare(
        self,
        name: str,
        spans: Sequence[tuple[int, int, int]],
        *,
        local: NixlRegion,
        remote: NixlRegion,
    ) -> int:
        """A request, not yet posted, to read `spans` (SpanPairs) of agent `name` into `local`."""
        ours = [(local.base + at, length, local.device) for _, at, length in spans]
        theirs = [(remote.base + at, length, remote.device) for at, _, length in spans]
        lists = [
            self._nixl.nixlXferDList(self._segment(region.memory), descriptors)
            for region, descriptors in ((local, ours), (remote, theirs))
        ]
        with self._typed(f"prepare a read from {name}"):
            read = self._nixl.NIXL_READ
            return int(self._agent.createXferReq(read, *lists, name, b"", self._backends))

    def post(self, request: int) -> bool:
        """Start; True when done already: on one host, UCX copies in this call, without the GIL."""
        with self._typed("start a read"):
            return bool(self._agent.postXferReq(request, b"") == self._nixl.NIXL_SUCCESS)

    def is_done(self, request: int) -> bool:
        """Progress the request."""
        with self._typed("finish a read"):
            return bool(self._agent.getXferStatus(request) == self._nixl.NIXL_SUCCESS)

    def release(self, request: int) -> None:
        """Free a request; one that is under way still writes (see `_Reader`)."""
        with self._typed("release a read"):
            self._agent.releaseXferReq(request)

    def close(self) -> None:
        """Unpin all, stop the progress thread and free the agent. Idempotent."""
        try:
            with self._typed("deregister the arena"):
                while self._registered:
                    self._agent.deregisterMem(self._registered.pop(), self._backends)
        finally:
            self._agent = None

    def _segment(self, kind: str) -> Any:
        return self._nixl.VRAM_SEG if kind == "VRAM" else self._nixl.DRAM_SEG


class _Typed:
    """Makes TransportErrors of NIXL's errors. Entered thrice per span, so no generator does it."""

    __slots__ = ("_action", "_errors")

    def __init__(self, errors: tuple[type[BaseException], ...], action: str) -> None:
        self._errors = errors
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._errors):
            raise TransportError(f"nixl could not {self._action}: {error}") from error


def load_nixl() -> ModuleType:
    """The bindings that the package `nixl` chooses; to choose, it may import all of torch.

    Heavy and optional, so not imported at the top of the file. Raises ConfigError.
    """
    try:
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(
            f"the nixl transport needs the nixl package ({error}): {how_to_install('nixl')}"
        ) from error
