"""`python -m connector.transports.nixl_owner AGENT FD NBYTES BINDINGS`: serves one host arena.

BINDINGS: the file that the node has loaded, without the package around it, which imports numpy.

A process of its own, since UCX 1.21 over TCP aborts the one that owes bytes to a reader which has
left: so a node loses this process, and starts another. It knows the arena by its descriptor, tells
the address on its output, and ends when its input does. Imports neither torch nor the node.
"""

import ctypes
import mmap
import os
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

from connector.transports.nixl_agent import NixlAgent

NO_HOOKS = ("UCX_MEM_EVENTS", "n")
"""UCX watches what a process unmaps, and takes 0.4 s for that; this one unmaps nothing in use."""


def serve(name: str, fd: int, nbytes: int, *, bindings: str) -> None:
    """Returns when the node closes this process's input, or ends in any other way."""
    told = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no address
    arena = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    region = (ctypes.addressof(ctypes.c_char.from_buffer(arena)), nbytes, 0)
    agent = NixlAgent(name, progress_thread=True, bindings=_load(bindings))
    registered = agent.register(region, "DRAM")
    with os.fdopen(told, "wb") as pipe:
        pipe.write(agent.address(region, "DRAM"))
    sys.stdin.buffer.read()
    agent.deregister(registered)
    agent.close()


def _load(file: str) -> ModuleType:
    loader = ExtensionFileLoader("_bindings", file)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    os.environ.setdefault(*NO_HOOKS)
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bindings=sys.argv[4])
