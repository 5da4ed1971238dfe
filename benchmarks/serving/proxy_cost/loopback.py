"""One app on a free port of this machine, as `benchmarks.support.processes` waits for it."""

import json
import socket
import sys

import uvicorn
from starlette.types import ASGIApp

HOST = "127.0.0.1"


async def serve(app: ASGIApp) -> None:
    """uvicorn as `uvicorn APP` starts it, without a log of requests, until SIGTERM."""
    listening = socket.create_server((HOST, 0), backlog=2048)
    port = listening.getsockname()[1]
    print(json.dumps({"url": f"http://{HOST}:{port}"}), file=sys.stderr, flush=True)
    config = uvicorn.Config(app, http="httptools", access_log=False, log_level="warning")
    await uvicorn.Server(config).serve(sockets=[listening])
