"""The `Node` service over anything that generates. Knows no engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from grpc import aio

from engine.errors import ForbiddenError, InvalidRequestError
from serving.generator import TokenSource
from serving.rpc import convert
from serving.rpc.caller_requests import CallerRequests
from serving.rpc.messages import NodeInfo
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import NodeServicer, add_NodeServicer_to_server


class NodeService(NodeServicer):
    """Maps calls to `source`; the end of an `Attach` closes all of its streams at once."""

    def __init__(
        self,
        source: TokenSource,
        describe: Callable[[], NodeInfo],
        tokenizer_files: Mapping[str, bytes],
        *,
        reset: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`reset` empties the prefix cache; None where no caller may."""
        self._source = source
        self._describe = describe
        self._tokenizer_files = tokenizer_files
        self._reset = reset
        self._drains = asyncio.Event()

    def register(self, server: aio.Server) -> None:
        add_NodeServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def drain(self) -> None:
        self._drains.set()

    async def Attach(
        self,
        commands: AsyncIterator[pb.Command | InvalidRequestError],
        context: aio.ServicerContext[pb.Command, pb.News],
    ) -> None:
        # The caller sends nothing before it knows that it was let in.
        await context.send_initial_metadata(())
        requests = CallerRequests(self._source)
        taking = asyncio.create_task(requests.take_all(commands))
        writing = asyncio.create_task(requests.write(context.write))
        draining = asyncio.create_task(self._drains.wait())
        tasks = (taking, writing, draining)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                await requests.end()
                await writing
        finally:
            await requests.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in (taking, writing):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.NodeInfo:
        return convert.to_pb(self._describe(), pb.NodeInfo)

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: object
    ) -> pb.TokenizerFiles:
        return pb.TokenizerFiles(files=self._tokenizer_files)

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: object
    ) -> pb.ResetPrefixCacheReply:
        if self._reset is None:
            raise ForbiddenError("it was started without --enable-reset-prefix-cache")
        await self._reset()
        return pb.ResetPrefixCacheReply()
