"""vLLM's toy proxy as a process that ends with its block.

It is `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py` of vLLM's repository, and needs
nothing of vLLM but its web framework.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from benchmarks.support.processes import ctrl_c_later, end_with_parent
from benchmarks.support.vllm_peer import LOOPBACK, VllmError, free_ports

START_S = 60.0
STOP_S = 10.0
POLL_S = 0.2
HTTP_S = 5.0


@dataclass(slots=True, frozen=True)
class ToyProxy:
    """Its file, and the Python that runs it."""

    python: Path
    file: Path

    @contextmanager
    def serving(
        self, prefill: Sequence[str], decode: Sequence[str], log: Path
    ) -> Iterator[tuple[str, int]]:
        """URL and process id of one in front of workers, by their URLs.

        Raises VllmError, with its log, where it does not serve.
        """
        (port,) = free_ports(1)
        words = [str(self.python), str(self.file), "--port", str(port)]
        words += _ports("prefiller", prefill) + _ports("decoder", decode)
        with log.open("wb") as file, ctrl_c_later():
            process = subprocess.Popen(
                words,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )
        try:
            url = f"http://{LOOPBACK}:{port}"
            _wait(f"{url}/healthcheck", process, log)
            yield url, process.pid
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ports(role: str, urls: Sequence[str]) -> list[str]:
    hosts = [LOOPBACK] * len(urls)
    ports = [str(urlsplit(url).port) for url in urls]
    return [f"--{role}-hosts", *hosts, f"--{role}-ports", *ports]


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urlopen(url, timeout=HTTP_S):
                return
        except (OSError, HTTPException) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")
                raise VllmError(f"vLLM's toy proxy does not serve:\n{said}") from error
            time.sleep(POLL_S)
