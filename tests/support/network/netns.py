"""Network namespaces joined by veth pairs, as hosts by cables. Knows no servers. Linux, root.

The file system and the processes are shared; a process or thread inside one sees only its own
loopback and its ends of cables.
"""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_REC_SLAVE = 0x4000 | 0x80000
MS_BIND = 0x1000
MNT_DETACH = 2
COMMAND_S = 30.0


def run(*command: str) -> None:
    """Fails with what the command said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def skip_if_impossible() -> None:
    """Skips the test where nobody may make namespaces and cables, with what forbids it."""
    if reason := obstacle():
        pytest.skip(f"two hosts need network namespaces and veth: {reason}")


@cache
def obstacle() -> str:
    """The reason why namespaces and cables are impossible here; empty where they are possible."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "not root, or no ip or unshare command"
    probe = ("unshare", "--net", "--mount", "ip", "link", "add", "type", "veth")
    done = subprocess.run(probe, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    except OSError as error:
        return f"no raw frames: {error}"
    return done.stderr.strip() if done.returncode else ""


@contextmanager
def namespaces(*names: str) -> Iterator[None]:
    """They exist, with nothing but loopback; afterwards they are gone, with their cables."""
    made: list[str] = []
    try:
        for name in names:
            run("ip", "netns", "add", name)
            made.append(name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=COMMAND_S)


@dataclass(slots=True, frozen=True)
class End:
    """One end of a cable: a network device in a namespace; None: the one this process lives in."""

    device: str
    namespace: str | None

    @property
    def inside(self) -> tuple[str, ...]:
        """`ip`, aimed at the namespace."""
        return ("ip",) if self.namespace is None else ("ip", "-n", self.namespace)

    def set_up(self, address: str | None = None) -> None:
        """Up, with an address unless it only passes on."""
        if address is not None:
            run(*self.inside, "address", "add", address, "dev", self.device)
        self.set_link("up")

    def set_link(self, state: str) -> None:
        """`up` or `down`: plugs this end in or pulls it out."""
        run(*self.inside, "link", "set", self.device, state)


@contextmanager
def cable(one: End, other: End) -> Iterator[None]:
    """Joins two namespaces; both ends are down at first, and both go when one goes."""
    assert other.namespace is not None
    peer = ("peer", other.device, "netns", other.namespace)
    run(*one.inside, "link", "add", one.device, "type", "veth", *peer)
    try:
        yield
    finally:
        run(*one.inside, "link", "delete", one.device)


def enter(namespace: str) -> None:
    """The calling thread, and threads that it starts, live inside from now on."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _call("setns", file, CLONE_NEWNET)
    finally:
        os.close(file)


def move_in(namespace: str) -> None:
    """This process, which has one thread, for good: with a /sys that shows the devices inside."""
    enter(namespace)
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC_SLAVE, None)
    _call("umount2", b"/sys", MNT_DETACH)
    _call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)


def see_file(file: Path, place: Path) -> None:
    """This process, which has moved in, finds `file` at `place` from now on."""
    _call("mount", bytes(file), bytes(place), None, MS_BIND, None)


def received_bytes(device: str) -> int:
    """Bytes that came in through a device of the namespace in which this process lives."""
    return int(Path(f"/sys/class/net/{device}/statistics/rx_bytes").read_text())


def _call(name: str, *arguments: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert getattr(libc, name)(*arguments) == 0, f"{name}: {os.strerror(ctypes.get_errno())}"
