"""The other process of the transport tests: it serves one arena until its stdin ends."""

import subprocess
import sys
from pathlib import Path

import torch

from connector.transports.choose import open_transport
from engine.arena import ArenaMemory

MIB = 1 << 20
ARENA_BYTES = 4 * MIB
DEADLINE_S = 20.0
ROOT = Path(__file__).parents[1]


def pattern(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (ARENA_BYTES,), dtype=torch.uint8, generator=generator)


class Peer:
    """Another process with an arena full of `pattern(seed)`."""

    def __init__(self, kind: str, name: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.transport_peer", kind, name, str(seed)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.name = name
        self.bytes = pattern(seed)
        self.address = bytes.fromhex(self.answer("address "))

    def answer(self, prefix: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # UCX may print warnings of its own
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()
        raise AssertionError(f"peer {self.name} ended with {self.process.wait(DEADLINE_S)}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.communicate("", timeout=DEADLINE_S)


def serve(kind: str, name: str, seed: str) -> None:
    torch.set_num_threads(1)
    arena = ArenaMemory(ARENA_BYTES)
    arena.tensor.copy_(pattern(int(seed)))
    transport = open_transport(kind, name)
    print("address", transport.register(arena).hex(), flush=True)
    sys.stdin.read()
    transport.close()
    arena.close()


if __name__ == "__main__":
    serve(*sys.argv[1:])
