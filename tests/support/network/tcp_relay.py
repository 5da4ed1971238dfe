"""A TCP relay between two nodes that can fall silent in either direction, and be healed.

What comes for a silent direction is read and lost: nobody is told, as when a network drops packets.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

CHUNK = 1 << 16


@dataclass(slots=True)
class Relay:
    """Listens on `port` for one node; `lost` names the directions that swallow everything."""

    target: int
    port: int = 0
    lost: set[str] = field(default_factory=set)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, down: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        up, to = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers += (back, to)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(down, to, "there"))
                group.create_task(self._pass_on(up, back, "back"))
        except* ConnectionError:
            pass
        finally:
            for writer in (to, back):
                writer.close()

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str
    ) -> None:
        while data := await source.read(CHUNK):
            if direction not in self.lost:
                sink.write(data)
                await sink.drain()
        sink.close()

    def heal(self) -> None:
        """Everything passes; connections with a gap in them are reset."""
        self.lost.clear()
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@asynccontextmanager
async def relay_to(port: int) -> AsyncIterator[Relay]:
    """A relay to a port of this machine."""
    relay = Relay(port)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        relay.heal()
        await server.wait_closed()
        await asyncio.sleep(0)
