"""PdConnector: the one place where the parts of a hand-over are put together."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Self

from connector.pd.config import PdConnectorConfig
from connector.pd.decode.admission import PdAdmission
from connector.pd.decode.peer_registry import PeerRegistry
from connector.pd.decode.pull_reader import STAGE_BYTES, PullReader
from connector.pd.decode.remote_prefills import RemotePrefills
from connector.pd.metrics import LEASE_COUNTERS, LEASE_GAUGES, PULL_GAUGES, TransferMetrics
from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.prefill.control_service import ControlService
from connector.pd.prefill.held_digests import ArenaDigests
from connector.pd.prefill.lease_records import LeaseRecords
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.prefill.producer import AdvertisedAddress, Producer
from connector.pd.scheduler import PdScheduler
from connector.pd.wire.geometry import describe_geometry
from connector.pd.wire.lease_record import REGION_BYTES
from connector.pd.wire.messages import Handshake
from connector.pd.wire.params import ParamsSigner
from connector.pd.worker import PdWorker
from connector.transports.auto import AutoTransport
from connector.transports.base import Transport
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from engine.kv_connector import Connector
from serving.config import KVTransferConfig, decode_config
from serving.node.connector import BuilderOf, NodeConnector, NodeParts
from serving.rpc.address import is_loopback
from serving.rpc.proof import signing_key
from serving.rpc.server import RpcService


@dataclass(frozen=True)
class PdConnector(NodeConnector):
    """A node's prefill/decode connector."""

    connector: Connector
    control: ControlHandler
    address: AdvertisedAddress
    leases: LeaseTable
    remote: RemotePrefills
    reader: PullReader
    transfers: TransferMetrics

    @classmethod
    def builder(
        cls,
        config: KVTransferConfig,
        builder_of: BuilderOf | None = None,
        *,
        open_transport: Callable[..., Transport] = open_transport,
        stage_bytes: int = STAGE_BYTES,
    ) -> Callable[[NodeParts], "PdConnector"]:
        """`open_transport` takes the arguments of `connector.transports.choose.open_transport`."""
        source = "kv_transfer_config.kv_connector_extra_config"
        extra = decode_config(config.kv_connector_extra_config, PdConnectorConfig, source)

        def build(node: NodeParts) -> "PdConnector":
            records = node.resources.enter_context(closing(ArenaMemory(REGION_BYTES)))
            transport = open_transport(
                extra.transport,
                node.engine_id,
                same_host=is_loopback(node.host),
                on_device=node.arena.device_index is not None,
                host=node.host,
            )
            node.resources.callback(transport.close)
            # Before anything can read or be read: peers get the keys of registered memory.
            transport.register(node.arena, records)
            reads = partial(PullReader, transport, node.arena, records, stage_bytes=stage_bytes)
            return cls._over(config, extra, node, transport=transport, records=records, reads=reads)

        return build

    def services(self) -> Sequence[RpcService]:
        return [ControlService(self.control)]

    def advertise(self, port: int) -> None:
        """The control service listens on `port`; goes into every `kv_transfer_params`."""
        self.address.port = port

    def is_awaited(self) -> bool:
        """True while a peer may come for a lease; spare ones, for a next turn, do not count."""
        return any(not lease.is_spare for lease in self.leases.all_held())

    def link_bytes_per_s(self) -> float:
        """The speed of pulls by this node."""
        return self.transfers.link.per_s

    @classmethod
    def _over(
        cls,
        config: KVTransferConfig,
        extra: PdConnectorConfig,
        node: NodeParts,
        *,
        transport: Transport,
        records: ArenaMemory,
        reads: Callable[..., PullReader],
    ) -> Self:
        """Builds each part from those above it."""
        resources, metrics, token = node.resources, node.metrics, node.cluster_token
        lease_s, transfers = extra.kv_lease_duration, TransferMetrics(metrics)
        # A call, as it is asked for at each handshake: the model's digest is not known yet, and the
        # address depends on who asks.
        identity = partial(_identity, node, transport=transport, lease_s=lease_s)
        on_device = node.arena.device_index is not None
        hashing = ArenaDigests(node.plan, node.arena.digests, on_device=on_device)
        digests = resources.enter_context(closing(hashing))
        lease_records = LeaseRecords(records.host_bytes().cast("Q"))
        leases = LeaseTable(lease_s, time.monotonic, lease_records, digests=digests)
        signer = ParamsSigner(None if token is None else signing_key(token))
        address = AdvertisedAddress(node.engine_id, node.host)
        producer = Producer(address, node.plan, leases, signer=signer, turn_ttl_s=extra.turn_ttl_s)

        peers = PeerRegistry(
            identity,
            transport,
            cluster_token=token,
            tls=node.tls,
            control_timeout_s=extra.control_timeout,
        )
        resources.push_async_callback(peers.close)
        remote = RemotePrefills(peers, lease_s, transfers)
        resources.push_async_callback(remote.close)
        reader = reads(verify=extra.verify_transfers, metrics=transfers)

        admission = PdAdmission(signer, remote, node, config=config, extra=extra, metrics=transfers)
        recomputes = config.kv_load_failure_policy == "recompute"
        scheduler = PdScheduler(
            producer, remote, leases=leases, extra=extra, recomputes=recomputes, metrics=transfers
        )
        worker = PdWorker(
            node.plan,
            reader,
            remote,
            leases=leases,
            metrics=transfers,
            config=extra,
            wake=node.wake,
        )
        # The engine closes it too, if it ever runs. Its threads may wait for the event loop.
        resources.push_async_callback(asyncio.to_thread, worker.close)
        metrics.read(producer, gauges=LEASE_GAUGES)
        metrics.read(leases, counters=LEASE_COUNTERS)
        metrics.read(worker, gauges=PULL_GAUGES)
        control = ControlHandler(node.engine_id, identity, leases, wake=node.wake)
        sides = Connector(admission, scheduler, worker)
        return cls(sides, control, address, leases, remote, reader, transfers)


def _identity(
    node: NodeParts, wanted: Sequence[str] = (), *, transport: Transport, lease_s: float
) -> Handshake:
    """This node as its peers see it; the address of its arena may change.

    `wanted`: transports of which a peer needs one, as those in use do not reach this node.
    """
    if isinstance(transport, AutoTransport):
        transport.offer(wanted)
    geometry = describe_geometry(
        node.plan, node.identity().fields, prefix_hash_seed=node.prefix_hash_seed
    )
    return Handshake(
        engine_id=node.engine_id,
        transport=transport.name,
        transport_address=transport.address,
        geometry=geometry,
        lease_s=lease_s,
    )
