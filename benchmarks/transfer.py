"""`python -m benchmarks.transfer`: GB/s of each transport next to memcpy and to NIXL without our wrapper.

Two processes on this host. Sizes are those of a Qwen3.5-0.8B-like hybrid in bf16: 6 attention layers of
2,048 B per token, 18 GDN layers whose states take 1,085,440 B each. Rounds are interleaved.
"""

import argparse
import ctypes
import importlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from connector.transports.base import SpanPair, Transport
from connector.transports.choose import open_transport
from connector.transports.nixl import NixlAddress
from engine.arena import ArenaMemory

ATTENTION_BYTES_PER_TOKEN = 6 * 2048
STATE_BYTES = 18 * 1_085_440
BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * ATTENTION_BYTES_PER_TOKEN
DEADLINE_S = 60.0
FILL = 7

Read = Callable[[Sequence[SpanPair]], None]


class Case(msgspec.Struct, frozen=True):
    """What is moved: the attention blocks of `tokens` tokens as `runs` runs, and one state."""

    name: str
    tokens: int
    runs: int

    def spans(self) -> list[SpanPair]:
        """Runs in reverse order on the local side, so that none of them join; then the state."""
        num_blocks = -(-self.tokens // BLOCK_TOKENS)
        cuts = [num_blocks * run // self.runs * BLOCK_BYTES for run in range(self.runs + 1)]
        total = cuts[-1]
        pieces = [
            SpanPair(start, total - end, end - start)
            for start, end in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        return [*pieces, SpanPair(total, total, STATE_BYTES)]


CASES = (
    Case("1,700 tokens, 1 run", 1_700, 1),
    Case("1,700 tokens, 4 runs", 1_700, 4),
    Case("1,700 tokens, every block apart", 1_700, 107),
    Case("16k tokens, 1 run", 16_384, 1),
    Case("16k tokens, 8 runs", 16_384, 8),
)
ARENA_BYTES = 16_384 * ATTENTION_BYTES_PER_TOKEN + STATE_BYTES


class Row(msgspec.Struct, frozen=True):
    """Median GB/s of one case by way."""

    case: str
    spans: int
    megabytes: float
    gigabytes_per_s: dict[str, float]


def serve(pipe: Connection) -> None:
    """The peer process: one arena, registered with every transport, until the pipe closes."""
    arena = ArenaMemory(ARENA_BYTES)
    arena.tensor.fill_(FILL)
    transports = [open_transport(name, "bench-p") for name in ("shm", "nixl")]
    pipe.send([transport.register(arena) for transport in transports])
    pipe.poll(None)
    for transport in transports:
        transport.close()
    arena.close()


@contextmanager
def peer_addresses() -> Iterator[list[bytes]]:
    """Addresses of a peer process, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join(DEADLINE_S)


def memcpy_read(arena: ArenaMemory) -> Read:
    """The ceiling: the same spans out of this process's own memory."""
    source = torch.full((ARENA_BYTES,), FILL, dtype=torch.uint8)

    def read(spans: Sequence[SpanPair]) -> None:
        for span in spans:
            ctypes.memmove(
                arena.data_ptr + span.local, source.data_ptr() + span.remote, span.length
            )

    return read


def transport_read(transport: Transport, address: bytes) -> Read:
    """Our transport as the connector uses it."""
    transport.connect("p", address)

    def read(spans: Sequence[SpanPair]) -> None:
        transport.read("p", spans).wait(DEADLINE_S)

    return read


def raw_nixl_read(arena: ArenaMemory, blob: bytes) -> Read:
    """NIXL's Python API as its examples use it: one request, polled without a pause, nothing checked.

    Without its progress thread, which would spin on a core that the other ways need.
    """
    nixl = importlib.import_module("nixl")  # heavy and optional
    agent = nixl.nixl_agent("bench-raw", nixl.nixl_agent_config(enable_prog_thread=False))
    agent.register_memory([(arena.data_ptr, arena.nbytes, 0, "")], "DRAM")
    peer = msgspec.msgpack.decode(blob, type=NixlAddress)
    agent.add_remote_agent(peer.metadata)

    def descriptors(base: int, offsets: Sequence[tuple[int, int]]) -> Any:
        return agent.get_xfer_descs([(base + start, size, 0) for start, size in offsets], "DRAM")

    def read(spans: Sequence[SpanPair]) -> None:
        local = descriptors(arena.data_ptr, [(span.local, span.length) for span in spans])
        remote = descriptors(peer.base, [(span.remote, span.length) for span in spans])
        request = agent.initialize_xfer("READ", local, remote, peer.agent)
        status = agent.transfer(request)
        while status == "PROC":
            status = agent.check_xfer_state(request)
        agent.release_xfer_handle(request)

    return read


def measure(case: Case, ways: dict[str, Read], arena: ArenaMemory, rounds: int) -> Row:
    """Median over `rounds` rounds, each running every way once; checks that the bytes arrived."""
    spans = case.spans()
    total = sum(span.length for span in spans)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, read in ways.items():
            arena.tensor[:total].zero_()
            started = time.perf_counter()
            read(spans)
            seconds[name].append(time.perf_counter() - started)
            assert bool((arena.tensor[:total] == FILL).all()), name
    speeds = {name: total / statistics.median(times) / 1e9 for name, times in seconds.items()}
    return Row(case.name, len(spans), total / 1e6, speeds)


def run(rounds: int) -> list[Row]:
    """All cases with a warm-up round each."""
    arena = ArenaMemory(ARENA_BYTES)
    shm, nixl = (open_transport(name, "bench-d") for name in ("shm", "nixl"))
    for transport in (shm, nixl):
        transport.register(arena)
    with peer_addresses() as (shm_address, nixl_address):
        ways = {
            "memcpy": memcpy_read(arena),
            "shm": transport_read(shm, shm_address),
            "raw nixl": raw_nixl_read(arena, nixl_address),
            "nixl": transport_read(nixl, nixl_address),
        }
        for case in CASES:
            measure(case, ways, arena, 1)
        rows = [measure(case, ways, arena, rounds) for case in CASES]
    for transport in (shm, nixl):
        transport.close()
    arena.close()
    return rows


def render(rows: Sequence[Row]) -> Table:
    """Speeds and the two ratios that matter: shm to memcpy, nixl to raw nixl."""
    table = Table(title="GB/s, median")
    headers = ("case", "spans", "MB", "memcpy", "shm", "shm/memcpy", "raw nixl", "nixl", "nixl/raw")
    for header in headers:
        table.add_column(header, justify="left" if header == "case" else "right")
    for row in rows:
        speed = row.gigabytes_per_s
        table.add_row(
            row.case,
            str(row.spans),
            f"{row.megabytes:.1f}",
            f"{speed['memcpy']:.2f}",
            f"{speed['shm']:.2f}",
            f"{speed['shm'] / speed['memcpy']:.2f}",
            f"{speed['raw nixl']:.2f}",
            f"{speed['nixl']:.2f}",
            f"{speed['nixl'] / speed['raw nixl']:.2f}",
        )
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(options.rounds)
    Console().print(render(rows))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
