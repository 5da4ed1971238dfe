"""The node's side of the process that serves its host memory to NIXL readers."""

import subprocess
import sys
import threading
from collections.abc import Sequence

import structlog

from connector.transports.nixl_agent import load_nixl
from connector.transports.ucx_worker import wait_readable
from engine.errors import TransportError

log = structlog.get_logger()

START_S = 30.0
STOP_S = 5.0
RESTART_S = 0.2  # before the next process starts, which may not live long either


class OwnerProcess:
    """A process that serves host memory (`nixl_owner`), and the next one when it is aborted.

    Then `address` changes: readers of the old one fail, and learn the new one when they shake
    hands again. `agent_name` begins the names of all agents, `memfds` are descriptors and lengths
    in bytes, `devices` are its network. Raises TransportError when none can be started.
    """

    def __init__(self, agent_name: str, memfds: Sequence[tuple[int, int]], *, devices: str) -> None:
        self._agent_name = agent_name
        self._memfds = memfds
        self._devices = devices
        self._is_over = threading.Event()
        self._process, self.address = self._start()
        self._watcher = threading.Thread(target=self._watch, name="kv-nixl-owner", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._is_over.set()
        _end(self._process)
        self._watcher.join(START_S + STOP_S)

    def _watch(self) -> None:
        """On a thread: start another process for one that ends before it should."""
        while not self._is_over.is_set():
            status = _listen(self._process)
            _end(self._process)
            if self._is_over.wait(RESTART_S):
                return
            log.warning("the process that served the arena over nixl has ended", status=status)
            try:
                self._process, self.address = self._start()
            except TransportError as error:
                log.warning("the arena is not served, to be tried again", error=str(error))
            # `close` may have come while the next process started, and ended the one before it.
            if self._is_over.is_set():
                _end(self._process)

    def _start(self) -> tuple[subprocess.Popen[bytes], bytes]:
        """A process and the address that it has told. Raises TransportError."""
        module = "connector.transports.nixl_owner"
        regions = [f"{fd}:{nbytes}" for fd, nbytes in self._memfds]
        arguments = [self._agent_name, self._devices, str(load_nixl().__file__), *regions]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[fd for fd, _ in self._memfds],
                start_new_session=True,  # Ctrl-C is for the node, which has requests to finish
            )
        except OSError as error:
            raise TransportError(f"nixl could not serve the arena: no process: {error}") from error
        assert process.stdout is not None and process.stderr is not None
        with process.stdout as pipe:
            if wait_readable((pipe.fileno(),), START_S) and (address := pipe.read()):
                return process, address
        _end(process)
        with process.stderr as pipe:
            last_words = pipe.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise TransportError(
            f"nixl could not serve the arena: its process told no address within {START_S} s and "
            f"ended with {process.returncode}: {last_words}"
        )


def _listen(process: subprocess.Popen[bytes]) -> int:
    """Copy its standard error to this node's log until it ends; its status."""
    if process.stderr is not None and not process.stderr.closed:
        with process.stderr as pipe:
            for said in pipe:
                line = said.decode(errors="replace").strip()
                log.info("nixl says", pid=process.pid, line=line)
    return process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
