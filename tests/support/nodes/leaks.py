"""The resources of a process, read from the kernel: descriptors, mappings, segments, children.

Works for the test's own process and for any other of the same user. Knows nothing of nodes.
"""

import asyncio
import gc
import ipaddress
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path

Holdings = Counter[str]

GRAMMAR_SERVER = "engine.grammars.fork_server"
# Python threads that nodes own; executors and gRPC keep theirs for the next call.
NODE_THREADS = ("engine", "kv-")
WAITING_FOR_CALLS = ("AioServer._request_call", "AioServer._request_registered_call")
ORPHANED_S = 5.0


def held_by(pid: int) -> Holdings:
    """Counts by kind; empty for a process that is gone."""
    found = Holdings(_descriptors(pid))
    found.update(_mappings(pid))
    found["child"] = len(children_of(pid))
    # Grammars without work are kept, within bounds: each has a socket, and so has their server.
    for server in grammar_servers(pid):
        found["child"] -= 1
        found["fd socket:"] -= 1 + len(children_of(server))
    found["sysv segment"] = len(segments_of(pid))
    return found


def held_here() -> Holdings:
    """`held_by` this process, with its node threads and asyncio tasks; call on the event loop."""
    gc.collect()
    found = held_by(os.getpid())
    names = (thread.name for thread in threading.enumerate())
    found["thread"] = sum(name.startswith(NODE_THREADS) for name in names)
    found["task"] = len(running_tasks())
    return found


def running_tasks() -> list[str]:
    """The names of the event loop's tasks, but for those in which gRPC waits for the next call.

    Of these a server has one for each method, and none for the moment in which a call arrives.
    """
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return sorted(name for name in names if name not in WAITING_FOR_CALLS)


def excess(before: Holdings, after: Holdings) -> Holdings:
    """Resources that are held now and were not before."""
    return after - before


def orphans() -> set[str]:
    """Names in /dev/shm that no living process maps: nobody will ever remove them.

    Semaphores of Python's multiprocessing are its own to remove: benchmarks that run beside have
    some, nodes have none.
    """
    names = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
    if names:
        used = "\n".join(_text(f"/proc/{pid}/maps") for pid in _pids())
        names = {name for name in names if f"/dev/shm/{name}" not in used}
    return names


def assert_no_orphans_but(before: set[str]) -> None:
    """Other processes of this machine make names, too, and map them a moment later."""
    deadline = time.monotonic() + ORPHANED_S
    while more := orphans() - before:
        assert time.monotonic() < deadline, f"left in /dev/shm: {sorted(more)}"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Process ids of living children."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        return [
            int(child) for task in tasks.iterdir() for child in _text(task / "children").split()
        ]
    except OSError:
        return []


def grammar_servers(pid: int) -> list[int]:
    """Children that fork a process for each grammar: a node has one from its first grammar on."""
    return [it for it in children_of(pid) if GRAMMAR_SERVER in _text(f"/proc/{it}/cmdline")]


def segments_of(pid: int) -> list[int]:
    """System V shared memory that `pid` created and that still exists."""
    rows = [line.split() for line in _text("/proc/sysvipc/shm").splitlines()[1:]]
    return [int(row[1]) for row in rows if int(row[4]) == pid]


def _descriptors(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    try:
        kinds = [_kind(f"{folder}/{fd}") for fd in os.listdir(folder)]
    except OSError:
        return []
    return [f"fd {kind}" for kind in kinds if kind is not None]


def _kind(path: str) -> str | None:
    """The kind of a descriptor, without the number that tells it from others of its kind.

    None: it has been closed since it was listed.
    """
    try:
        return re.sub(r"\[\d+\]|-[0-9a-f]{16}|_posix_[0-9a-f]+", "", os.readlink(path))
    except OSError:
        return None


def _mappings(pid: int) -> list[str]:
    lines = _text(f"/proc/{pid}/maps").splitlines()
    shared = ("/memfd:tandem-arena", "/dev/shm/", "/SYSV")
    return [f"mapping {kind}" for line in lines for kind in shared if kind in line]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports on which a process listens over TCP."""
    mine = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()]
        for row in rows:
            if row[3] == "0A" and f"socket:[{row[9]}]" in mine:
                host, port = row[1].split(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found
