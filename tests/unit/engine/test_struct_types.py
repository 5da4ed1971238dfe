"""Several threads decode a type that none has used yet: msgspec's own first use is not safe."""

import subprocess
import sys

FIRST_USE = """
import sys, threading
sys.setswitchinterval(1e-6)
from serving.api.json_body import decode_body
from serving.api.schema import ChatRequest
body = b'{"messages": [{"role": "user", "content": "x"}], "unknown": 1}'
start = threading.Barrier(3)
def run():
    start.wait()
    decode_body(body, ChatRequest, 4096, strict=False)
threads = [threading.Thread(target=run) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_the_first_bodies_may_come_at_once() -> None:
    """Without the lock about one in three of these processes dies of a null pointer."""
    command = [sys.executable, "-c", FIRST_USE]
    ends = [subprocess.run(command, capture_output=True, timeout=60).returncode for _ in range(12)]
    assert ends == [0] * 12
