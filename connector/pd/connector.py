"""PdConnector: the one assembly list of what hands prefills over between nodes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from connector.pd.config import PdConnectorConfig
from connector.pd.decode.admission import PdAdmission
from connector.pd.decode.peer_registry import PeerRegistry
from connector.pd.decode.pull_reader import STAGE_BYTES, PullReader
from connector.pd.decode.puller import Puller
from connector.pd.decode.remote_prefills import RemotePrefills
from connector.pd.faults import NO_FAULTS, FaultInjector
from connector.pd.metrics import LEASE_COUNTERS, LEASE_GAUGES, PULL_GAUGES, TransferMetrics
from connector.pd.prefill.arena_digests import ArenaDigests
from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.prefill.control_service import ControlService
from connector.pd.prefill.lease_records import LeaseRecords
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.prefill.producer import AdvertisedAddress, Producer
from connector.pd.scheduler import PdScheduler
from connector.pd.wire.geometry import describe_geometry
from connector.pd.wire.lease_record import REGION_BYTES
from connector.pd.wire.messages import Handshake
from connector.pd.wire.params import ParamsSigner
from connector.pd.worker import PdWorker
from connector.transports.base import Transport
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from engine.config import KVTransferConfig, decode_config
from engine.kv_cache.plan import ArenaPlan
from engine.kv_connector import Connector
from engine.metrics import NodeMetrics
from engine.node.connector import ConnectorSettings
from engine.rpc.address import is_loopback
from engine.rpc.cluster_token import signing_key
from engine.rpc.server import RpcService


@dataclass(slots=True)
class PdConnector:
    """A node's prefill/decode connector; see `engine.node.connector.NodeConnector`."""

    connector: Connector
    control: ControlHandler
    address: AdvertisedAddress
    leases: LeaseTable
    remote: RemotePrefills
    reader: PullReader
    peers: PeerRegistry
    transport: Transport
    digests: ArenaDigests
    records: ArenaMemory

    def services(self) -> Sequence[RpcService]:
        """The control service that peers call."""
        return [ControlService(self.control)]

    def advertise(self, port: int) -> None:
        """The control service listens on `port`; goes into every `kv_transfer_params`."""
        self.address.port = port

    def is_awaited(self) -> bool:
        """Whether a peer may still come: turns kept for nobody in particular do not count."""
        return any(not lease.is_spare for lease in self.leases.all_held())

    def close(self) -> None:
        """Gives channels, mappings and registrations back; after the engine has stopped."""
        self.peers.close()
        self.digests.close()
        self.transport.close()
        self.records.close()


@dataclass(slots=True, frozen=True)
class PdBuilder:
    """Builds the PdConnector of one node (`engine.node.connector.ConnectorBuilder`)."""

    extra: PdConnectorConfig
    faults: FaultInjector = NO_FAULTS
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
        """`wake` makes an idle engine step."""
        extra, faults = self.extra, self.faults
        transport = open_transport(
            extra.transport,
            settings.engine_id,
            same_host=is_loopback(settings.host),
            on_device=arena.device_index is not None,
            host=settings.host,
        )
        digests = ArenaDigests(plan, arena.read)
        records = ArenaMemory(REGION_BYTES)
        transport.register(arena, records)
        identity = partial(_identity, settings, plan, extra=extra, transport=transport)
        leases = LeaseTable(
            extra.kv_lease_duration, time.monotonic, LeaseRecords(records.host_bytes().cast("Q"))
        )
        token = settings.cluster_token
        signer = ParamsSigner(None if token is None else signing_key(token))
        peers = _peers(settings, identity(), transport, extra=extra, faults=faults)
        transfers = TransferMetrics(metrics)
        claims = RemotePrefills(peers, extra.kv_lease_duration, transfers)
        advertised = AdvertisedAddress(settings.engine_id, settings.host)
        reader = PullReader(
            transport,
            arena,
            records,
            verify=extra.verify_transfers,
            metrics=transfers,
            faults=faults,
            stage_bytes=self.stage_bytes,
        )
        producer = Producer(
            advertised, plan, leases, digests=digests, signer=signer, turn_ttl_s=extra.turn_ttl_s
        )
        scheduler = PdScheduler(producer, leases, claims, config=extra, metrics=transfers)
        puller = Puller(plan, reader, claims, metrics=transfers, config=extra, wake=wake)
        admission = PdAdmission(signer, claims, settings, extra=extra, metrics=transfers)
        metrics.read(producer, gauges=LEASE_GAUGES)
        metrics.read(leases, counters=LEASE_COUNTERS)
        metrics.read(puller, gauges=PULL_GAUGES)
        return PdConnector(
            Connector(admission, scheduler, PdWorker(puller, leases)),
            ControlHandler(identity, leases, digests=digests, wake=wake, faults=faults),
            advertised,
            leases,
            claims,
            reader,
            peers,
            transport,
            digests,
            records,
        )


def _peers(
    settings: ConnectorSettings,
    identity: Handshake,
    transport: Transport,
    *,
    extra: PdConnectorConfig,
    faults: FaultInjector,
) -> PeerRegistry:
    return PeerRegistry(
        identity,
        transport,
        cluster_token=settings.cluster_token,
        tls=settings.tls,
        control_timeout_s=extra.control_timeout,
        faults=faults,
    )


def _identity(
    settings: ConnectorSettings,
    plan: ArenaPlan,
    *,
    extra: PdConnectorConfig,
    transport: Transport,
) -> Handshake:
    """What this node tells its peers about itself."""
    return Handshake(
        engine_id=settings.engine_id,
        transport=transport.name,
        transport_address=transport.address,
        geometry=describe_geometry(
            plan, settings.model_fingerprint, prefix_hash_seed=settings.prefix_hash_seed
        ),
        lease_s=extra.kv_lease_duration,
    )
