"""The `Node` service over anything that generates. Knows no engine."""

from collections.abc import Callable, Mapping
from contextlib import aclosing

from grpc import aio

from engine.generator import TokenSource
from engine.rpc import convert
from engine.rpc.messages import NodeInfo
from engine.rpc.pb import node_pb2 as pb
from engine.rpc.pb.node_pb2_grpc import NodeServicer, add_NodeServicer_to_server


class NodeService(NodeServicer):
    """Maps calls to `source`; a cancelled call closes its stream at once."""

    def __init__(
        self,
        source: TokenSource,
        describe: Callable[[], NodeInfo],
        tokenizer_files: Mapping[str, bytes],
    ) -> None:
        self._source = source
        self._describe = describe
        self._tokenizer_files = tokenizer_files

    def register(self, server: aio.Server) -> None:
        add_NodeServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: aio.ServicerContext[pb.GenerateRequest, pb.GenerateOutput],
    ) -> None:
        async with aclosing(self._source.generate(convert.request_from_pb(request))) as outputs:
            async for output in outputs:
                await context.write(convert.output_to_pb(output))

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.NodeInfo:
        return convert.to_pb(self._describe(), pb.NodeInfo)

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: object
    ) -> pb.TokenizerFiles:
        return pb.TokenizerFiles(files=self._tokenizer_files)
