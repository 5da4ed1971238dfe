"""Handles of device memory for other processes, through the CUDA driver's library.

The driver's own functions by ctypes: `libcuda.so.1` is wherever a device is, under this name and
with these symbols for every CUDA release since 11, so nothing depends on torch's version. Torch's
sharing of storages would keep a count in a file for each reader, of which a peer tells the name.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from connector.transports.address import Natural, Nbytes
from engine.arena import ArenaMemory
from engine.errors import TransportError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_PEER_ACCESS = 1  # between devices, once a copy needs it
_SEGMENTS = "memory of expandable segments (PYTORCH_CUDA_ALLOC_CONF) has no handle"


class DeviceRegion(msgspec.Struct, frozen=True, tag_field="memory", tag="device"):
    """`nbytes` from `offset` on in the allocation that `handle` opens; `device`: its UUID."""

    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: Natural
    nbytes: Nbytes
    device: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Foreign:
    """Bytes at an address of a device, as torch takes over memory that it did not allocate."""

    def __init__(self, address: int, nbytes: int) -> None:
        shape = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = shape


@dataclass(slots=True, frozen=True, eq=False)
class OpenedMemory:
    """A peer's memory: `content` uint8 [nbytes], mapped at `base` for device `near`."""

    content: Tensor
    base: int
    near: int


class CudaMemory:
    """Exports, opens and closes; raises TransportError for all that the driver refuses."""

    def __init__(self) -> None:
        try:
            self._driver: Any = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise TransportError(f"the CUDA driver is not here: {error}") from error
        self._call("start", "cuInit", 0)

    def export(self, arena: ArenaMemory) -> DeviceRegion:
        """The handle of an arena's memory, for other processes."""
        assert arena.device_index is not None
        handle = _Handle()
        with self._context(arena.device_index) as device:
            # A handle opens a whole allocation, in which torch may have placed others first.
            base, _ = self._allocation(arena.data_ptr)
            make = f"make a handle of the arena ({_SEGMENTS})"
            self._call(make, "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
            named = self._uuid(device)
        content = ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)
        return DeviceRegion(content, arena.data_ptr - base, arena.nbytes, named)

    def open(self, region: DeviceRegion, near: int) -> OpenedMemory:
        """A peer's memory, to be read by device `near`. Close it by `close`.

        Raises TransportError also for a device that `near` cannot reach, and for a region that is
        not inside its allocation: to copy from there would end what this process has on the device.
        """
        opened = ctypes.c_uint64()
        with self._context(near) as device, ExitStack() as undo:
            self._check_reach(region.device, device)
            handle, flags = _Handle.from_buffer_copy(region.handle), ctypes.c_uint(_PEER_ACCESS)
            called = "open the peer's handle", "cuIpcOpenMemHandle_v2"
            self._call(*called, ctypes.byref(opened), handle, flags)
            undo.callback(self._driver.cuIpcCloseMemHandle, opened)
            _, size = self._allocation(opened.value)
            if region.offset + region.nbytes > size:
                raise TransportError(
                    f"{region.nbytes} B at {region.offset} end past the peer's allocation ({size})"
                )
            try:
                content = torch.as_tensor(_Foreign(opened.value + region.offset, region.nbytes))
                content[:1].cpu()  # what cannot be read is known now, and not in the first pull
            except RuntimeError as error:
                raise TransportError(f"cannot read the peer's memory: {error}") from error
            undo.pop_all()
        return OpenedMemory(content, opened.value, near)

    def close(self, opened: OpenedMemory) -> None:
        """Unmaps what `open` returned; nothing reads it any more."""
        with self._context(opened.near):
            base = ctypes.c_uint64(opened.base)
            self._call("close the peer's handle", "cuIpcCloseMemHandle", base)

    def _check_reach(self, uuid: str, near: int) -> None:
        """Raises TransportError unless device `near` reads memory of the device of this UUID."""
        count, able = ctypes.c_int(), ctypes.c_int()
        self._call("count devices", "cuDeviceGetCount", ctypes.byref(count))
        for device in range(count.value):
            if self._uuid(device) == uuid:
                break
        else:
            raise TransportError(f"the peer's device {uuid} is not visible to this process")
        if device != near:
            asked = "ask for access", "cuDeviceCanAccessPeer"
            self._call(*asked, ctypes.byref(able), ctypes.c_int(near), ctypes.c_int(device))
            if not able.value:
                raise TransportError(f"device {near} has no access to the peer's device {device}")

    @contextmanager
    def _context(self, index: int) -> Iterator[int]:
        """The context that torch uses on a device is this thread's in the block; the device."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("find the device", "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("begin", "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        with ExitStack() as stack:
            stack.callback(self._driver.cuDevicePrimaryCtxRelease_v2, device)
            self._call("begin", "cuCtxPushCurrent_v2", context)
            stack.callback(self._driver.cuCtxPopCurrent_v2, ctypes.byref(ctypes.c_void_p()))
            yield device.value

    def _allocation(self, address: int) -> tuple[int, int]:
        """Address and bytes of the allocation around an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        places = ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        self._call(f"find an allocation ({_SEGMENTS})", "cuMemGetAddressRange_v2", *places)
        return base.value, size.value

    def _uuid(self, device: int) -> str:
        found = (ctypes.c_ubyte * 16)()
        self._call("name a device", "cuDeviceGetUuid_v2", found, ctypes.c_int(device))
        return bytes(found).hex()

    def _call(self, action: str, function: str, *arguments: Any) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            reason = (text.value or b"unknown").decode(errors="replace")
            raise TransportError(f"the CUDA driver could not {action}: {reason} ({code})")
