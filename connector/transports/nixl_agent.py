"""NIXL's bindings with one UCX backend, typed errors and plain arguments. Knows no peers or arenas.

Not NIXL's own `nixl_agent` class: that one fixes the progress thread's delay at 0, so that an idle
process spins on a whole core, and serialises descriptors with pickle.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec

from connector.transports.address import Nbytes, PerRegion
from engine.errors import ConfigError, TransportError

Descriptor = tuple[int, int, int]  # NIXL's: address, length in bytes, device index
MemoryKind = Literal["DRAM", "VRAM"]

_PROGRESS_DELAY_US = 5000  # how long the progress thread sleeps when no event wakes it


class NixlRegion(msgspec.Struct, frozen=True):
    """Registered memory of a peer: address of byte 0, bytes, kind, index of its device."""

    base: Nbytes
    nbytes: Nbytes
    memory: MemoryKind
    device: Annotated[int, msgspec.Meta(ge=0, lt=1024)]


class NixlAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="nixl"):
    """A peer's agent and memory. Descriptors are built here from base + offset, never received."""

    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=64 * 1024)]
    regions: Annotated[tuple[NixlRegion, ...], PerRegion]


class NixlAgent:
    """One NIXL agent; not thread-safe. Raises ConfigError without the nixl package.

    `progress_thread`: needed to answer peers over TCP while nobody calls. An agent that only reads
    is about twice as fast without it: the thread fights the caller for the UCX worker. `devices`:
    the only ones that UCX uses and listens on, by comma (`ucx_worker.network_devices`); empty: all.
    """

    def __init__(
        self,
        name: str,
        *,
        progress_thread: bool,
        devices: str,
        bindings: ModuleType | None = None,
    ) -> None:
        self._nixl = bindings or load_nixl()
        # NIXL's errors share no base class but Exception.
        named = [kind for name, kind in vars(self._nixl).items() if name.endswith("Error")]
        self._errors = (RuntimeError, *named)
        self.name = name
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        with self._typed("open the UCX backend"):
            self._agent: Any = self._nixl.nixlAgent(name, config)
            # `peer`: UCX reports a peer that vanished instead of waiting for it for ever.
            options = {"ucx_error_handling_mode": "peer", **_only(devices)}
            backend = self._agent.createBackend("UCX", options)
        self._backends = [backend]

    def _typed(self, action: str) -> "_Typed":
        return _Typed(self._errors, action)

    def register(self, region: NixlRegion) -> Any:
        """Pin the region; the result is what `deregister` takes."""
        segment, descriptor = self._segment(region.memory), (region.base, region.nbytes)
        registered = self._nixl.nixlRegDList(segment, [(*descriptor, region.device, "")])
        with self._typed(f"register {region.nbytes} B of {region.memory}"):
            self._agent.registerMem(registered, self._backends)
        return registered

    def deregister(self, registered: Any) -> None:
        """Unpin."""
        with self._typed("deregister the arena"):
            self._agent.deregisterMem(registered, self._backends)

    def address(self, regions: Sequence[NixlRegion]) -> bytes:
        """A NixlAddress of registered regions, encoded: what a peer needs to read from them."""
        with self._typed("describe itself"):
            metadata = bytes(self._agent.getLocalMD())
        return msgspec.msgpack.encode(NixlAddress(self.name, metadata, tuple(regions)))

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
        local: Sequence[Descriptor],
        remote: Sequence[Descriptor],
        *,
        kinds: tuple[MemoryKind, MemoryKind],
    ) -> int:
        """A read request, not yet posted; `kinds` of the local and remote memory."""
        lists = [
            self._nixl.nixlXferDList(self._segment(kind), descriptors)
            for kind, descriptors in zip(kinds, (local, remote), strict=True)
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
        """Stop the progress thread and free the agent; the last call on this object."""
        self._agent = None

    def _segment(self, kind: MemoryKind) -> Any:
        return self._nixl.VRAM_SEG if kind == "VRAM" else self._nixl.DRAM_SEG


def _only(devices: str) -> dict[str, str]:
    """NIXL's options that keep UCX to some devices."""
    # One option cuts its value at the first comma, and so takes one device, the interface. The
    # other takes many, and appends `:1` to the last, which must be the first port of an RDMA
    # device.
    if not devices.endswith(":1"):
        return {"engine_config": f"NET_DEVICES={devices}"} if devices else {}
    return {"device_list": devices.removesuffix(":1")}


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
            f"the nixl transport needs the nixl package ({error}): pip install tandem[nixl]"
        ) from error
