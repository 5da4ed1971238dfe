"""Bytes of an arena on the host: of a host arena without a copy, of a device's by a copy."""

import ctypes
import signal
from collections.abc import Callable, Iterator

import pytest

from engine.arena import ArenaMemory
from tests.support.nodes.device_arena import DeviceArena
from tests.support.nodes.forks import forks


def by_numpy(arena: ArenaMemory) -> int:
    return int(arena.tensor.numpy()[4096])


def by_torch(arena: ArenaMemory) -> int:
    return int(arena.tensor.sum())


def by_address(arena: ArenaMemory) -> int:
    return ctypes.string_at(arena.data_ptr, 1)[0]


TOUCHES = {"numpy": by_numpy, "torch": by_torch, "address": by_address}


@pytest.fixture(params=[ArenaMemory, DeviceArena])
def arena(request: pytest.FixtureRequest) -> Iterator[ArenaMemory]:
    memory: ArenaMemory = request.param(3 * 4096)
    yield memory
    memory.close()


def test_what_is_written_is_read(arena: ArenaMemory) -> None:
    with arena.writable(4000, 200) as view:
        view[:] = bytes(range(200))
    assert bytes(arena.read(4000, 200)) == bytes(range(200))
    assert bytes(arena.read(3999, 2)) == b"\0\0"
    assert bytes(arena.read(4199, 3)) == b"\xc7\0\0"


def test_only_a_host_arena_gives_its_own_bytes() -> None:
    host, device = ArenaMemory(4096), DeviceArena(4096)
    for memory, expected in ((host, b"ab"), (device, b"\0\0")):
        view = memory.read(10, 2)
        with memory.writable(10, 2) as target:
            target[:] = b"ab"
        assert bytes(view) == expected
        assert bytes(memory.read(10, 2)) == b"ab"
    with pytest.raises(ValueError, match="on device 0, not on the host"):
        device.host_bytes()
    host.close()
    device.close()


def test_a_device_keeps_its_bytes_when_filling_fails() -> None:
    device = DeviceArena(4096)
    with pytest.raises(RuntimeError), device.writable(0, 4) as view:
        view[:] = b"lost"
        raise RuntimeError
    assert bytes(device.read(0, 4)) == b"\0\0\0\0"
    device.close()


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_whoever_does_not_ask_a_device_arena_is_ended(touch: Callable[[ArenaMemory], int]) -> None:
    process = forks().Process(target=touch_a_device, args=(touch,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGSEGV


def touch_a_device(touch: Callable[[ArenaMemory], int]) -> None:
    touch(DeviceArena(8192))


def test_a_closed_arena_has_no_bytes(arena: ArenaMemory) -> None:
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.read(0, 1)
    with pytest.raises(ValueError, match="closed"), arena.writable(0, 1):
        pass
