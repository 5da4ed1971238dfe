"""A node on another host, used as one in this process: requests and outputs go over gRPC."""

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.types import GenerateOutput, GenerateRequest
from serving.rpc.client import NodeClient, StreamDeadlines
from tests.support.network.two_hosts import Host
from tests.support.nodes.processes import CLUSTER_TOKEN, ServerProcess

PIPE_BYTES = 1 << 16


@dataclass(slots=True, frozen=True)
class RemoteEngine:
    """Generates as an engine of this process would."""

    client: NodeClient

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """Raises what the node raised."""
        return self.client.generate(request, StreamDeadlines())


@dataclass(slots=True, frozen=True)
class RemoteNode:
    """The part of a node that tests of the hand-over need."""

    engine: RemoteEngine


@asynccontextmanager
async def remote_node(host: Host, server: ServerProcess, folder: Path) -> AsyncIterator[RemoteNode]:
    """`server` of `host`, through a door in the file system, which both hosts share."""
    found = re.search(r'"grpc_port": (\d+)', server.said)
    assert found is not None, server.said
    door = Door(host, int(found[1]))
    path = folder / f"{host.name}:{found[1]}"  # proofs name the port, which ends an address
    async with await asyncio.start_unix_server(door.join, path):
        client = NodeClient(f"unix:{path}", token=CLUSTER_TOKEN)
        try:
            yield RemoteNode(RemoteEngine(client))
        finally:
            await client.close()
            await door.close()


@dataclass(slots=True)
class Door:
    """Passes connections on to a port of another host."""

    host: Host
    port: int
    pumps: list[asyncio.Task[None]] = field(default_factory=list)

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes one connection on; a thread of the other host opens the half that leads there."""
        address = (self.host.address, self.port)
        made = await asyncio.to_thread(self.host.do, socket.create_connection, address)
        inner_reader, inner_writer = await asyncio.open_connection(sock=made)
        both = [
            asyncio.create_task(_pump(reader, inner_writer)),
            asyncio.create_task(_pump(inner_reader, writer)),
        ]
        self.pumps += both
        await asyncio.wait(both)

    async def close(self) -> None:
        """Cuts connections that gRPC keeps open for a while after a channel was closed."""
        for pump in self.pumps:
            pump.cancel()
        await asyncio.gather(*self.pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(PIPE_BYTES):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # the other side has gone
    finally:
        writer.close()
