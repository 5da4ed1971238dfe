"""The HTTP server's own socket: small writes leave at once."""

import asyncio
import socket

from starlette.applications import Starlette

from engine.api.http_server import HttpServer


async def test_connections_have_no_nagle_delay() -> None:
    server = HttpServer(Starlette(), "127.0.0.1", 0, drain_timeout_s=1)
    await server.start()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.sleep(0.05)  # until the server has accepted
        accepted = [
            state.transport.get_extra_info("socket")
            for state in server._server.server_state.connections
        ]
        options = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in accepted]
        assert options == [1]
        writer.close()
        await writer.wait_closed()
    finally:
        await server.close()
