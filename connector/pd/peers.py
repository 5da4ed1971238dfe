"""The prefill nodes that this node talks to: one handshake and one mapping per incarnation.

Called from pull and control threads, never from the engine thread or the event loop.
"""

import threading
from dataclasses import dataclass, field

import structlog

from connector.pd.geometry import check_geometry
from connector.transports.base import Transport
from engine.errors import KVTransferParamsError
from engine.rpc.control_client import ControlClient
from engine.rpc.messages import Handshake

log = structlog.get_logger()
PeerAddress = tuple[str, int]


@dataclass(slots=True)
class Peer:
    """One incarnation of a prefill node. `users` counts claims that may touch its mapping."""

    engine_id: str
    control: ControlClient
    timeout_s: float
    users: int = 0
    is_gone: bool = False


@dataclass(slots=True)
class _Entry:
    """What is known at one address; the lock serialises handshakes with it, and only with it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    peer: Peer | None = None


class PeerRegistry:
    """Owner of control channels and transport connections; gives them back on `close`."""

    def __init__(
        self,
        identity: Handshake,
        transport: Transport,
        *,
        cluster_token: str | None,
        control_timeout_s: float,
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._token = cluster_token
        self._timeout_s = control_timeout_s
        self._lock = threading.Lock()
        self._entries: dict[PeerAddress, _Entry] = {}

    def acquire(self, host: str, port: int, engine_id: str) -> Peer:
        """The peer at (host, port), which must be incarnation `engine_id`; pair with `release`.

        Raises KVTransferParamsError when another incarnation answers, TransportError when the two nodes do not
        fit, UnavailableError or DeadlineExceededError when nobody answers.
        """
        with self._lock:
            entry = self._entries.setdefault((host, port), _Entry())
        with entry.lock:
            if entry.peer is None or entry.peer.engine_id != engine_id or entry.peer.is_gone:
                self._replace(entry, self._handshake(host, port, engine_id))
            assert entry.peer is not None
            entry.peer.users += 1
            return entry.peer

    def release(self, peer: Peer) -> None:
        """Ends one use of `peer`."""
        with self._lock:
            peer.users -= 1
            unused = peer.is_gone and not peer.users
        if unused:
            self._drop(peer)

    def forget(self, peer: Peer) -> None:
        """The peer did not answer: the next use shakes hands again."""
        with self._lock:
            peer.is_gone = True

    def close(self) -> None:
        """Drops every peer; call when no thread uses one any more."""
        with self._lock:
            entries, self._entries = self._entries, {}
        for entry in entries.values():
            if entry.peer is not None:
                self._drop(entry.peer)

    def _replace(self, entry: _Entry, peer: Peer) -> None:
        with self._lock:
            old, entry.peer = entry.peer, peer
            unused = old is not None and not old.users
            if old is not None:
                old.is_gone = True
        if old is not None and unused:
            self._drop(old)

    def _handshake(self, host: str, port: int, engine_id: str) -> Peer:
        control = ControlClient(
            _join(host, port), token=self._token, caller_engine_id=self._identity.engine_id
        )
        try:
            reply = control.handshake(timeout_s=self._timeout_s)
            if reply.engine_id != engine_id:
                raise KVTransferParamsError(
                    f"{host}:{port} is {reply.engine_id}, not {engine_id}; that node is gone",
                    code="foreign_kv_transfer_params",
                )
            check_geometry(self._identity, reply)
            self._transport.connect(engine_id, reply.transport_address)
        except BaseException:
            control.close()
            raise
        log.info("connected to peer", peer=engine_id, host=host, port=port)
        return Peer(engine_id, control, self._timeout_s)

    def _drop(self, peer: Peer) -> None:
        """A newer handshake with the same incarnation uses the same mapping, which then stays."""
        with self._lock:
            current = [entry.peer for entry in self._entries.values()]
        if not any(o and o is not peer and o.engine_id == peer.engine_id for o in current):
            self._transport.disconnect(peer.engine_id)
        peer.control.close()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
