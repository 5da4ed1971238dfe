"""PdConnector: the one place where the parts of a hand-over are put together."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

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
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_connector import Connector
from serving.config import KVTransferConfig, decode_config
from serving.metrics import NodeMetrics
from serving.node.connector import ConnectorSettings
from serving.rpc.address import is_loopback
from serving.rpc.proof import signing_key
from serving.rpc.server import RpcService


@dataclass(slots=True, frozen=True)
class PdConnector:
    """A node's prefill/decode connector; see `serving.node.connector.NodeConnector`.

    `resources`: all that was opened for it.
    """

    connector: Connector
    control: ControlHandler
    address: AdvertisedAddress
    leases: LeaseTable
    remote: RemotePrefills
    reader: PullReader
    transfers: TransferMetrics
    resources: ExitStack

    def services(self) -> Sequence[RpcService]:
        """The control service that peers call."""
        return [ControlService(self.control)]

    def advertise(self, port: int) -> None:
        """The control service listens on `port`; goes into every `kv_transfer_params`."""
        self.address.port = port

    def is_awaited(self) -> bool:
        """True while a peer may come for a lease; spare ones, for a next turn, do not count."""
        return any(not lease.is_spare for lease in self.leases.all_held())

    def link_bytes_per_s(self) -> float:
        """Of pulls by this node."""
        return self.transfers.link.per_s

    def close(self) -> None:
        self.resources.close()


@dataclass(slots=True, frozen=True)
class PdBuilder:
    """Builds the PdConnector of one node (`serving.node.connector.ConnectorBuilder`).

    `open_transport` takes the arguments of `connector.transports.choose.open_transport`.
    """

    extra: PdConnectorConfig
    open_transport: Callable[..., Transport] = open_transport
    stage_bytes: int = STAGE_BYTES

    @classmethod
    def of(cls, config: KVTransferConfig) -> "PdBuilder":
        """Raises ConfigError for an extra config that is none of the PdConnector's."""
        source = "kv_transfer_config.kv_connector_extra_config"
        return cls(decode_config(config.kv_connector_extra_config, PdConnectorConfig, source))

    def __call__(
        self,
        settings: ConnectorSettings,
        plan: ArenaPlan,
        arena: ArenaMemory,
        *,
        metrics: NodeMetrics,
        wake: Callable[[], None],
    ) -> PdConnector:
        """Builds each part from those above it; if one fails, closes those that were opened."""
        extra, token = self.extra, settings.cluster_token
        lease_s = extra.kv_lease_duration
        with ExitStack() as opened:
            records = opened.enter_context(closing(ArenaMemory(REGION_BYTES)))
            transport = self.open_transport(
                extra.transport,
                settings.engine_id,
                same_host=is_loopback(settings.host),
                on_device=arena.device_index is not None,
                host=settings.host,
            )
            opened.callback(transport.close)
            transport.register(arena, records)
            identity = partial(_identity, settings, plan, transport=transport, lease_s=lease_s)

            words = records.host_bytes().cast("Q")
            digests = opened.enter_context(closing(ArenaDigests(plan, arena.read)))
            leases = LeaseTable(lease_s, time.monotonic, LeaseRecords(words), digests=digests)
            signer = ParamsSigner(None if token is None else signing_key(token))
            address = AdvertisedAddress(settings.engine_id, settings.host)
            producer = Producer(address, plan, leases, signer=signer, turn_ttl_s=extra.turn_ttl_s)
            control = ControlHandler(settings.engine_id, identity, leases, wake=wake)

            transfers = TransferMetrics(metrics)
            peers = PeerRegistry(
                identity,
                transport,
                cluster_token=token,
                tls=settings.tls,
                control_timeout_s=extra.control_timeout,
            )
            opened.callback(peers.close)
            remote = opened.enter_context(closing(RemotePrefills(peers, lease_s, transfers)))
            reader = PullReader(
                transport,
                arena,
                records,
                verify=extra.verify_transfers,
                metrics=transfers,
                stage_bytes=self.stage_bytes,
            )

            admission = PdAdmission(signer, remote, settings, extra=extra, metrics=transfers)
            scheduler = PdScheduler(
                producer, remote, settings, leases=leases, extra=extra, metrics=transfers
            )
            worker = PdWorker(
                plan, reader, remote, leases=leases, metrics=transfers, config=extra, wake=wake
            )
            opened.callback(worker.close)
            metrics.read(producer, gauges=LEASE_GAUGES)
            metrics.read(leases, counters=LEASE_COUNTERS)
            metrics.read(worker, gauges=PULL_GAUGES)
            sides = Connector(admission, scheduler, worker)
            return PdConnector(
                sides, control, address, leases, remote, reader, transfers, opened.pop_all()
            )


def _identity(
    settings: ConnectorSettings,
    plan: ArenaPlan,
    wanted: Sequence[str] = (),
    *,
    transport: Transport,
    lease_s: float,
) -> Handshake:
    """This node as its peers see it; the address of its arena may change.

    `wanted`: transports of which a peer needs one, as those in use do not reach this node.
    """
    if isinstance(transport, AutoTransport):
        transport.offer(wanted)
    geometry = describe_geometry(
        plan, settings.identity().fields, prefix_hash_seed=settings.prefix_hash_seed
    )
    return Handshake(
        engine_id=settings.engine_id,
        transport=transport.name,
        transport_address=transport.address,
        geometry=geometry,
        lease_s=lease_s,
    )
