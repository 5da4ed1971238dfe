"""A node's word to the proxies that it lives, given again and again until it drains.

    --proxy URL ──name──▶ addresses ──each──▶ link: Join, wait a third of the lease, Join, ...

A name with several addresses stands for a proxy at each, and is looked up again in time: proxies
come and go too. A proxy that cannot be reached costs nothing but a log line.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog

from engine.errors import TandemError
from serving.rpc.address import is_loopback, join_host_port
from serving.rpc.channel import ProvingChannel
from serving.rpc.node_http import NodeUrl, parse_node_url, resolve_grpc_address
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import MembershipStub
from serving.tls import ClientTls

log = structlog.get_logger()

CALL_S: Final = 5.0
LEAVE_S: Final = 2.0
RETRY_S: Final = 1.0
SERVING: Final = "serving"
LOOK_UP_S: Final = 5.0
"""From one look at a proxy's name to the next."""


@dataclass(slots=True, frozen=True)
class Introduction:
    """The fields of a Join: incarnation, kind, and the URL of the node's gRPC port."""

    engine_id: str
    kind: str
    url: str


class Registration:
    """Keeps a node known to proxies, from `register_with` to `leave`. One event loop."""

    def __init__(
        self, introduction: Introduction, *, token: str | None, tls: ClientTls | None
    ) -> None:
        self._introduction = introduction
        self._token = token
        self._tls = tls
        self._urls: tuple[NodeUrl, ...] = ()
        self._addresses: dict[NodeUrl, list[NodeUrl]] = {}
        self._links: dict[str, _Link] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def register_with(self, proxies: Sequence[str]) -> None:
        """These proxies know the node from now on, and no others.

        Raises ConfigError for what is no URL.
        """
        self._urls = tuple(parse_node_url(text) for text in proxies)
        self._changed.set()
        if self._task is None and self._urls:
            self._task = asyncio.create_task(self._follow_names())

    @property
    def proxies(self) -> tuple[str, ...]:
        """The URLs that the node was told."""
        return tuple(url.text for url in self._urls)

    @property
    def stages(self) -> dict[str, str]:
        """By address of a proxy, how far it says that this node is: see `tandem.v1.JoinReply`."""
        return {url: link.stage for url, link in self._links.items()}

    async def leave(self) -> None:
        """Proxies send no new requests from now on; those that cannot be told will find out."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.leave() for link in links))

    async def _follow_names(self) -> None:
        while True:
            self._changed.clear()
            urls = self._urls
            await asyncio.gather(*map(self._look_up, urls))
            wanted = {each.text: each for url in urls for each in self._addresses[url]}
            for text in self._links.keys() - wanted.keys():
                await self._links.pop(text).leave()
            for text in wanted.keys() - self._links.keys():
                link = _Link(wanted[text], self._introduction, token=self._token, tls=self._tls)
                self._links[text] = link
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_UP_S):
                    await self._changed.wait()

    async def _look_up(self, url: NodeUrl) -> None:
        """Sets the addresses of a proxy's name; where nobody knows it now, they stay as they were.

        With TLS the name is what the certificate says, so it stays a name.
        """
        if url.has_tls or is_loopback(url.host):
            self._addresses[url] = [url]
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CALL_S):
                found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            log.warning("a proxy's name is not known", proxy=url.text, problem=str(error))
            self._addresses.setdefault(url, [])
            return
        hosts = dict.fromkeys(str(address[0]) for *_, address in found)
        self._addresses[url] = [
            replace(url, text=f"{url.scheme}://{join_host_port(host, url.port)}", host=host)
            for host in hosts
        ]


class _Link:
    """One proxy: joins until it leaves."""

    def __init__(
        self, url: NodeUrl, introduction: Introduction, *, token: str | None, tls: ClientTls | None
    ) -> None:
        self.stage = ""
        self._url = url
        self._introduction = introduction
        self._token = token
        self._tls = tls if url.has_tls else None
        self._problem = ""
        self._channel: ProvingChannel | None = None
        self._task = asyncio.create_task(self._keep_joined())

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._channel is not None:
            leave = MembershipStub(self._channel.grpc).Leave  # type: ignore[no-untyped-call]
            request = pb.LeaveRequest(engine_id=self._introduction.engine_id)
            # Else its lease ends, and its port answers nobody.
            with suppress(TandemError):
                await self._channel.call(leave, request, LEAVE_S)
            await self._channel.close()

    async def _keep_joined(self) -> None:
        while True:
            try:
                lease_s = await self._join()
            except TandemError as error:
                self._note("", str(error))
                # Its port may be another one when it comes back.
                await self._disconnect()
                await asyncio.sleep(RETRY_S)
            else:
                # Until it serves, the node asks more often how far it is.
                is_serving = self.stage == SERVING
                await asyncio.sleep(max(RETRY_S, lease_s / 3 if is_serving else 0.0))

    async def _join(self) -> float:
        """Returns the seconds of the lease. Raises a TandemError without an answer."""
        if self._channel is None:
            address = await resolve_grpc_address(self._url, timeout_s=CALL_S, tls=self._tls)
            self._channel = ProvingChannel(address, token=self._token, tls=self._tls)
        me = self._introduction
        request = pb.JoinRequest(engine_id=me.engine_id, kind=me.kind, url=me.url)
        join = MembershipStub(self._channel.grpc).Join  # type: ignore[no-untyped-call]
        reply: pb.JoinReply = await self._channel.call(join, request, CALL_S)
        self._note(reply.stage, reply.problem)
        return reply.lease_s

    def _note(self, stage: str, problem: str) -> None:
        """Logs what has changed, and no more."""
        if (stage, problem) != (self.stage, self._problem):
            say = log.info if stage else log.warning
            what = "node is registered" if stage else "node is not registered"
            say(what, proxy=self._url.text, stage=stage, problem=problem)
        self.stage, self._problem = stage, problem

    async def _disconnect(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
