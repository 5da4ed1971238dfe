"""A cable that is long, uneven and lossy: a process that passes frames on between two devices.

Both lie in its network namespace and have no address there, as the ports of a switch. Frames keep
their offload metadata (PACKET_VNET_HDR): on veth, checksums are not filled in and segments not cut.
"""

import os
import random
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.network.netns import COMMAND_S

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
FRAME_BYTES = 1 << 17  # more than TCP ever gives to a device at once
SOCKET_BYTES = 64 << 20
SEED = 13
HOLDING = "holding"


@dataclass(slots=True)
class Lane:
    """One direction. Frames keep their order: each leaves after its delay, and none overtakes."""

    source: socket.socket
    target: socket.socket
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    passed: int = 0
    lost: int = 0
    last_due: float = 0.0

    def take(self, delay_s: float, jitter_s: float, loss: float) -> None:
        """All frames that have come; some get lost."""
        while (frame := receive(self.source)) is not None:
            if self.chance.random() < loss:
                self.lost += 1
                continue
            delay = delay_s + jitter_s * self.chance.uniform(-1.0, 1.0)
            self.last_due = max(self.last_due, time.monotonic() + delay)
            self.waiting.append((self.last_due, frame))

    def pass_on(self, until: int | None) -> None:
        """Every frame that is due, up to `until` bytes in all."""
        now = time.monotonic()
        while self.waiting and self.waiting[0][0] <= now and (until is None or self.passed < until):
            frame = self.waiting.popleft()[1]
            try:
                self.target.send(frame)
                self.passed += len(frame)
            except OSError:  # the device is down: what a cable carries then is lost
                self.lost += 1


@dataclass(slots=True)
class Switch:
    """Both lanes, and what is asked of them; `hold_at`: stop when the second lane has passed that.

    Commands are lines: `delay SECONDS JITTER`, `loss SHARE`, `hold BYTES`, `go`, `count`.
    """

    lanes: tuple[Lane, Lane]
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    hold_at: int | None = None
    said: bool = False

    def work(self) -> None:
        """Until stdin ends."""
        poller = select.poll()
        for file in (sys.stdin.fileno(), *(lane.source.fileno() for lane in self.lanes)):
            poller.register(file, select.POLLIN)
        while True:
            ready = {file for file, _ in poller.poll(self._pause_ms())}
            if sys.stdin.fileno() in ready and not self._obey(os.read(sys.stdin.fileno(), 4096)):
                return
            for lane in self.lanes:
                lane.take(self.delay_s, self.jitter_s, self.loss)
            self._pass_on()

    @property
    def is_holding(self) -> bool:
        """Nothing passes in either direction."""
        return self.hold_at is not None and self.lanes[1].passed >= self.hold_at

    def _pass_on(self) -> None:
        self.lanes[1].pass_on(self.hold_at)
        if not self.is_holding:
            self.lanes[0].pass_on(None)
        elif not self.said:
            self.said = True
            print(HOLDING, flush=True)

    def _pause_ms(self) -> float | None:
        due = [lane.waiting[0][0] for lane in self.lanes if lane.waiting]
        if self.is_holding or not due:
            return None
        return max(0.0, 1e3 * (min(due) - time.monotonic()))

    def _obey(self, text: bytes) -> bool:
        for line in text.decode().splitlines():
            command, *values = line.split()
            match command, [float(value) for value in values]:
                case "delay", [delay, jitter]:
                    self.delay_s, self.jitter_s = delay, jitter
                case "loss", [share]:
                    self.loss = share
                case "hold", [more]:
                    self.hold_at, self.said = self.lanes[1].passed + int(more), False
                case "go", []:
                    self.hold_at = None
                case "count", []:
                    print(*(f"{lane.passed} {lane.lost}" for lane in self.lanes), flush=True)
                case _:
                    raise ValueError(line)
        return bool(text)


class Relay:
    """The process, from the test's side: between device `far` and device `near` of a namespace."""

    def __init__(self, namespace: str, far: str, near: str) -> None:
        inside = ("ip", "netns", "exec", namespace)
        command = [*inside, sys.executable, "-m", "tests.support.network.relay", near, far]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        self._count()  # it works

    def be_far(self, delay_s: float, jitter_s: float) -> None:
        """Every frame takes `delay_s`, give or take `jitter_s`, in each direction."""
        self._tell(f"delay {delay_s} {jitter_s}")

    def lose(self, share: float) -> None:
        """This share of all frames vanishes."""
        self._tell(f"loss {share}")

    def hold_behind(self, nbytes: int) -> None:
        """Everything stops when `nbytes` more have gone from far to near."""
        self._tell(f"hold {nbytes}")

    def holds(self, patience_s: float = 0.0) -> bool:
        """Whether everything has stopped since `hold_behind`; says so once."""
        return self._has_spoken(patience_s) and self._hear() == HOLDING

    def go_on(self) -> None:
        """Ends the hold: frames that were held leave."""
        self._tell("go")

    def count_passed(self) -> int:
        """Bytes that have gone from far to near."""
        return self._count()[2]

    def count_lost(self) -> int:
        """Frames of both directions that are gone."""
        _, lost_there, _, lost_back = self._count()
        return lost_there + lost_back

    def _count(self) -> list[int]:
        self._tell("count")
        while (line := self._hear()) == HOLDING:
            pass
        return [int(number) for number in line.split()]

    def stop(self) -> None:
        """It ends by itself."""
        try:
            self.process.communicate(timeout=COMMAND_S)
            assert self.process.returncode == 0
        finally:
            self.process.kill()
            self.process.wait(COMMAND_S)

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _hear(self) -> str:
        assert self.process.stdout is not None
        assert self._has_spoken(COMMAND_S), "the relay says nothing"
        return self.process.stdout.readline().strip()

    def _has_spoken(self, patience_s: float) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], patience_s)[0])


def open_device(name: str) -> socket.socket:
    """All frames that come in through a device, and a way to send some."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        opened.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
    opened.bind((name, ETH_P_ALL))
    opened.setblocking(False)
    return opened


def receive(device: socket.socket) -> bytes | None:
    """One frame after its metadata, if one has come."""
    try:
        return device.recv(FRAME_BYTES)
    except OSError:  # nothing there, or the device has just gone down
        return None


def relay(near: str, far: str) -> None:
    """Until stdin ends."""
    one, other = open_device(near), open_device(far)
    Switch((Lane(one, other), Lane(other, one))).work()


if __name__ == "__main__":
    relay(*sys.argv[1:])
