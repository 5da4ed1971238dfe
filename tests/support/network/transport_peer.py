"""The other process of the transport tests: it serves one arena until it is told to end.

All are forks of one server that has imported torch already, as importing costs more than a test.
"""

import multiprocessing
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import NamedTuple

import torch

from connector.transports.choose import open_transport
from connector.transports.nixl_owner import NO_HOOKS
from engine.arena import ArenaMemory
from tests.support.network.netns import End, move_in
from tests.support.network.relay import Relay
from tests.support.nodes.forks import forks
from tests.support.nodes.processes import signal_all

MIB = 1 << 20
ARENA_BYTES = 4 * MIB
SECOND_BYTES = 8192
DEADLINE_S = 20.0
# `nixl-tcp`: as between hosts, where there is one only; `-hosts`: between two.
ONE_HOST = ("shm", "nixl", "nixl-tcp", "ucx", "zmq")
TWO_HOSTS = ("nixl-hosts", "ucx-hosts", "zmq-hosts")
KINDS = (*ONE_HOST, *TWO_HOSTS)
ONCE_EACH = ("shm", "nixl", "ucx", "zmq")


class Place(NamedTuple):
    """Where a peer lives: the address of that host, and its network namespace if not ours."""

    address: str = "127.0.0.1"
    namespace: str | None = None


HERE = Place()


class Wire(NamedTuple):
    """The cable between two hosts: its far end can be pulled out, its relay can stop and lose."""

    plug: End
    relay: Relay


class Road(NamedTuple):
    """The way from the process that reads to its peers; only another host has a wire."""

    near: Place = HERE
    far: Place = HERE
    wire: Wire | None = None


LOCAL = Road()


class Life(NamedTuple):
    """The parameters of a new peer.

    `environment`: UCX's settings, which the fork server has not; hooks do not pay in a short life.
    """

    transport: str
    name: str
    seed: int
    place: Place
    environment: Mapping[str, str]


def pattern(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (ARENA_BYTES,), dtype=torch.uint8, generator=generator)


def second_of(seed: int) -> torch.Tensor:
    return 255 - pattern(seed)[:SECOND_BYTES]


class Peer:
    """Another process with an arena full of `pattern(seed)`, and `second_of(seed)` as region 1."""

    def __init__(self, kind: str, name: str, seed: int, place: Place = HERE) -> None:
        ucx = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
        life = Life(kind, name, seed, place, dict([NO_HOOKS]) | ucx)
        self.name = name
        self.bytes = pattern(seed)
        self.second = second_of(seed)
        self._told, theirs = multiprocessing.Pipe()
        self._process: ForkServerProcess = forks().Process(
            target=serve, args=(theirs, life), daemon=True
        )
        self._process.start()
        theirs.close()
        self.address = self._first_word()

    def signal(self, number: signal.Signals) -> None:
        """To all its processes."""
        assert self._process.pid is not None
        signal_all(self._process.pid, number)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def address_now(self) -> bytes:
        """It may have changed."""
        self._told.send("address")
        return self._first_word()

    def ended(self) -> int | None:
        """The status with which it ends, negative for a signal."""
        self._process.join(DEADLINE_S)
        return self._process.exitcode

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.ended() is not None

    def stop(self) -> None:
        """It ends by itself; a killed one has ended."""
        self._told.close()
        try:
            assert self.ended() is not None, f"peer {self.name} does not end"
        finally:
            self._process.kill()
            self._process.join()

    def _first_word(self) -> bytes:
        try:
            assert self._told.poll(DEADLINE_S), f"peer {self.name} says nothing"
            address: bytes = self._told.recv()
        except (EOFError, AssertionError):
            self.kill()
            raise
        return address


def serve(told: Connection, life: Life) -> None:
    """One life, up to the end of `told`."""
    if life.place.namespace is not None:
        move_in(life.place.namespace)
    os.environ.update(life.environment)
    torch.set_num_threads(1)
    arena = ArenaMemory(ARENA_BYTES)
    arena.tensor.copy_(pattern(life.seed))
    transport = open_transport(life.transport, life.name, host=life.place.address)
    second = ArenaMemory(SECOND_BYTES)
    second.tensor.copy_(second_of(life.seed))
    transport.register(arena, second)
    with suppress(EOFError):
        while True:
            told.send(transport.address)
            told.recv()
    transport.close()
    arena.close()
    second.close()
