"""`python -m connector.transports.nixl_owner AGENT DEVICES BINDINGS FD:NBYTES...`: serves memory.

BINDINGS: the file that the node has loaded, without the package around it, which imports numpy.

A process of its own, since UCX 1.21 over TCP aborts the one that owes bytes to a reader which has
left: so a node loses this process, and starts another. It knows regions by their descriptors, tells
the address on its output, and ends when its input does. Imports neither torch nor the node.

It maps the memory read-only, since UCX lets every peer that has the address write. A peer that
tries over TCP ends this process. A network card that may read must be given memory that it may
write as well: where one refuses, a region is mapped writable, and the log says so.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

from connector.transports.nixl_agent import NixlAgent, NixlRegion
from engine.errors import TransportError

NO_HOOKS = ("UCX_MEM_EVENTS", "n")
"""UCX watches what a process unmaps, and takes 0.4 s for that; this one unmaps nothing in use."""
_MAP_FAILED = ctypes.c_void_p(-1).value


def serve(name: str, memfds: Sequence[tuple[int, int]], *, devices: str, bindings: str) -> None:
    """Returns when the node closes this process's input, or ends in any other way."""
    told = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no address
    agent = NixlAgent(name, progress_thread=True, devices=devices, bindings=_load(bindings))
    for fd, nbytes in memfds:
        try:
            agent.register(NixlRegion(_map(fd, nbytes, mmap.PROT_READ), nbytes, "DRAM", 0))
        except TransportError as error:
            news = f"peers can write the arena, as it cannot be registered read-only: {error}"
            print(news, file=sys.stderr, flush=True)
            base = _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            agent.register(NixlRegion(base, nbytes, "DRAM", 0))
    with os.fdopen(told, "wb") as pipe:
        pipe.write(agent.address)
    sys.stdin.buffer.read()
    agent.close()


def _map(fd: int, nbytes: int, protection: int) -> int:
    """The address of byte 0. Python's mmap tells none of memory that it may not write."""
    if nbytes > os.fstat(fd).st_size:
        raise OSError(f"mmap of {nbytes} B of a file that has {os.fstat(fd).st_size}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = libc.mmap(None, nbytes, protection, flags, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} B: {os.strerror(ctypes.get_errno())}")
    return int(address)


def _load(file: str) -> ModuleType:
    loader = ExtensionFileLoader("_bindings", file)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    os.environ.setdefault(*NO_HOOKS)
    agent, devices, bindings, *regions = sys.argv[1:]
    memfds = [(int(fd), int(nbytes)) for fd, _, nbytes in (it.partition(":") for it in regions)]
    serve(agent, memfds, devices=devices, bindings=bindings)
