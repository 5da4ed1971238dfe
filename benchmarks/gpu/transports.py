"""The phase `transports`: reads of another process's arena, with nothing around them.

P's arena is on the device; D's is there, or on the host. Settings of UCX come in the environment of
both processes, before it starts.
"""

import os
from contextlib import closing
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.sheet import BYTES, SPANS, Ceilings, Setting, Sheet, gb_per_s
from connector.transports.base import SpanPair, Transport
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from engine.errors import TransportError
from serving.process import configure_logging

# Within one card: least and wished percents of its own rate of copying.
BOUNDS = MappingProxyType({"cuda_ipc": (80, 95), "nixl": (50, 80)})
RECORDS = 2 << 20
WAIT_S = 25.0
ROUNDS = 5


class Case(NamedTuple):
    """One pair of processes."""

    transport: str
    here: str
    settings: dict[str, str]

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.transport} to {self.here}{', ' if settings else ''}{settings}"


def run(sheet: Sheet, setting: Setting) -> None:
    """Each case in two fresh processes, as UCX reads its settings once."""
    device = setting.device
    cases = [
        Case("cuda_ipc", device, {}),
        Case("nixl", device, {"UCX_PROTO_INFO": "y"}),
        Case("nixl", device, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto"}),
        Case("nixl", "cpu", {}),
        Case("zmq", device, {}),
    ]
    nbytes = 32 << 20 if setting.quick else BYTES
    ceilings = Ceilings.measure(setting) if setting.on_gpu else None
    for case in cases if setting.on_gpu else cases[-1:]:
        with sheet.attempt(str(case)):
            taken = _measure(sheet, case, device, nbytes=nbytes)
            if ceilings is not None and case.here == device and case.transport in BOUNDS:
                _judge(sheet, case, taken, nbytes=nbytes, ceilings=ceilings)


def _judge(
    sheet: Sheet, case: Case, taken: list[tuple[int, float]], *, nbytes: int, ceilings: Ceilings
) -> None:
    least, wished = BOUNDS[case.transport]
    for count, seconds in taken:
        # Read and written, as a copy is.
        share = 100 * 2 * nbytes / seconds / ceilings.copy
        what = f"{case}, {count} spans, of the card's copies"
        sheet.accept(what, share, "%", accept=least, goal=wished, at_least=True)


def _measure(sheet: Sheet, case: Case, device: str, *, nbytes: int) -> list[tuple[int, float]]:
    """The time of each number of spans, in seconds."""
    taken: list[tuple[int, float]] = []
    context: Any = torch.multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        del os.environ[name]
    os.environ.update(case.settings)
    works = ((_own, (case, device)), (_read, (case,)))
    processes = [
        context.Process(target=work, args=(theirs, *given), kwargs={"nbytes": nbytes})
        for (work, given), (_, theirs) in zip(works, pipes, strict=True)
    ]
    owner, reader = (ours for ours, _ in pipes)
    try:
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        reader.send(_answer(owner))
        for count in SPANS:
            told = _answer(reader)
            if isinstance(told, str):
                sheet.tell(f"{case}, {count} spans", told[:200], "failed")
                break
            seconds, is_right = told
            rate = gb_per_s(nbytes, seconds)
            sheet.tell(f"{case}, {count} spans", rate, "right" if is_right else "wrong")
            taken.append((count, seconds))
    finally:
        for pipe in (owner, reader):
            pipe.close()
        for process in processes:
            process.join(5.0)
            process.kill()
    return taken


def _answer(pipe: Any) -> Any:
    if not pipe.poll(WAIT_S):
        raise TimeoutError(f"no word for {WAIT_S} s")
    return pipe.recv()


def _pattern(nbytes: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=draw)


def _own(pipe: Any, case: Case, device: str, *, nbytes: int) -> None:
    """P: serves its arena until the pipe closes."""
    configure_logging("warning")
    with (
        closing(ArenaMemory(nbytes, device=device)) as arena,
        closing(ArenaMemory(RECORDS)) as rest,
    ):
        arena.tensor.copy_(_pattern(nbytes))
        on_device = arena.device_index is not None
        transport = open_transport(case.transport, "p", on_device=on_device)
        with closing(transport):
            transport.register(arena, rest)
            pipe.send(transport.address)
            pipe.poll(None)


def _read(pipe: Any, case: Case, *, nbytes: int) -> None:
    """D: the time of a read by number of spans, or what went wrong."""
    configure_logging("warning")
    arena, rest = ArenaMemory(nbytes, device=case.here), ArenaMemory(RECORDS)
    on_device = arena.device_index is not None
    transport = open_transport(case.transport, "d", on_device=on_device)
    with closing(arena), closing(rest), closing(transport):
        transport.register(arena, rest)
        truth = _pattern(nbytes).to(arena.tensor.device)
        transport.connect("p", pipe.recv())
        try:
            for count in SPANS:
                seconds = _time(transport, arena, count)
                pipe.send((seconds, bool(torch.equal(truth, arena.tensor))))
        except TransportError as error:  # told, since the other process has the rows
            pipe.send(f"{type(error).__name__}: {error}")


def _time(transport: Transport, arena: ArenaMemory, count: int) -> float:
    """The median of some reads of all bytes, which are cleared before each."""
    length = arena.nbytes // count
    order = [(7 * number) % count * length for number in range(count)]
    spans = [SpanPair(at, at, length) for at in order]
    taken = []
    for _ in range(ROUNDS):
        arena.tensor.fill_(0)
        if arena.device_index is not None:
            torch.cuda.synchronize()
        started = perf_counter()
        transport.read("p", spans).wait(WAIT_S)
        taken.append(perf_counter() - started)
    return sorted(taken)[ROUNDS // 2]
