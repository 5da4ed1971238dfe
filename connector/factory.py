"""The one assembly list of a node's connector: which classes make up a producer and a consumer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from connector.multi import MultiScheduler, MultiWorker
from connector.pd.admission import PdAdmission
from connector.pd.claims import ClaimKeeper
from connector.pd.consumer import ConsumerScheduler, ConsumerWorker
from connector.pd.control import LeaseDesk
from connector.pd.digests_ahead import ArenaDigests
from connector.pd.faults import NO_FAULTS, FaultInjector
from connector.pd.geometry import describe_geometry
from connector.pd.lease import LeaseTable
from connector.pd.lease_records import LeaseRecords
from connector.pd.params import ParamsSigner
from connector.pd.peers import PeerRegistry
from connector.pd.producer import (
    AdvertisedAddress,
    ProducerScheduler,
    ProducerWorker,
    held_bytes,
)
from connector.pd.reading import STAGE_BYTES, PullReader
from connector.transports.base import Transport
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from engine.kv_cache.plan import ArenaPlan
from engine.kv_connector import Connector
from engine.metrics import NodeMetrics, TransferMetrics
from engine.node.connector import ConnectorSettings
from engine.rpc.address import is_loopback
from engine.rpc.cluster_token import signing_key
from engine.rpc.control_service import ControlService
from engine.rpc.messages import Handshake
from engine.rpc.server import RpcService


@dataclass(slots=True)
class PdConnector:
    """A node's prefill/decode connector; see `engine.node.connector.NodeConnector`."""

    connector: Connector
    desk: LeaseDesk
    address: AdvertisedAddress
    leases: LeaseTable
    claims: ClaimKeeper
    peers: PeerRegistry
    transport: Transport
    digests: ArenaDigests

    def services(self) -> Sequence[RpcService]:
        """The control service that peers call."""
        return [ControlService(self.desk)]

    def advertise(self, port: int) -> None:
        """The control service listens on `port`; goes into every `kv_transfer_params`."""
        self.address.port = port

    def is_awaited(self) -> bool:
        """Whether a lease lives that is no spare one."""
        return any(not lease.is_spare for lease in self.leases.all_held())

    def close(self) -> None:
        """Gives channels, mappings and registrations back; after the engine has stopped."""
        self.peers.close()
        self.digests.close()
        self.transport.close()


def build_connector(
    settings: ConnectorSettings,
    plan: ArenaPlan,
    arena: ArenaMemory,
    *,
    metrics: NodeMetrics,
    wake: Callable[[], None],
    faults: FaultInjector = NO_FAULTS,
    stage_bytes: int = STAGE_BYTES,
) -> PdConnector:
    """Everything behind `--kv-transfer-config` for one node; `wake` makes an idle engine step."""
    extra = settings.config.kv_connector_extra_config
    transport = open_transport(
        extra.transport,
        settings.engine_id,
        same_host=is_loopback(settings.host),
        host=settings.host,
    )
    digests = ArenaDigests(plan, arena)
    transport.register(arena)
    records = LeaseRecords(arena)
    identity = partial(_identity, settings, plan, digests, records=records, transport=transport)
    leases = _watched_leases(extra.kv_lease_duration, plan, metrics, records=records)
    token = settings.cluster_token
    signer = ParamsSigner(None if token is None else signing_key(token))
    peers = _peers(settings, identity(), transport, faults=faults)
    transfers = TransferMetrics(metrics)
    claims = ClaimKeeper(peers, extra.kv_lease_duration, transfers)
    advertised = AdvertisedAddress(settings.engine_id, settings.host)
    reader = PullReader(
        transport,
        arena,
        verify=extra.verify_transfers,
        metrics=transfers,
        faults=faults,
        stage_bytes=stage_bytes,
    )
    producer = ProducerScheduler(
        advertised, plan, leases, digests=digests, signer=signer, turn_ttl_s=extra.turn_ttl_s
    )
    consumer = ConsumerScheduler(
        claims, recompute_threshold=extra.kv_recompute_threshold, metrics=transfers
    )
    puller = ConsumerWorker(plan, reader, claims, metrics=transfers, config=extra, wake=wake)
    return PdConnector(
        Connector(
            PdAdmission(signer, claims, settings.config, metrics=transfers),
            MultiScheduler([producer, consumer]),
            MultiWorker([ProducerWorker(leases), puller]),
        ),
        LeaseDesk(identity, leases, digests=digests, wake=wake, faults=faults),
        advertised,
        leases,
        claims,
        peers,
        transport,
        digests,
    )


def _peers(
    settings: ConnectorSettings,
    identity: Handshake,
    transport: Transport,
    *,
    faults: FaultInjector,
) -> PeerRegistry:
    return PeerRegistry(
        identity,
        transport,
        cluster_token=settings.cluster_token,
        tls=settings.tls,
        control_timeout_s=settings.config.kv_connector_extra_config.control_timeout,
        faults=faults,
    )


def _watched_leases(
    duration_s: float, plan: ArenaPlan, metrics: NodeMetrics, *, records: LeaseRecords
) -> LeaseTable:
    leases = LeaseTable(duration_s, time.monotonic, records)
    metrics.read_gauge(
        "tandem:held_lease_bytes",
        "Bytes of finished requests that are held under a lease.",
        lambda: held_bytes(plan, leases),
    )
    metrics.read_total(
        "vllm:nixl_num_kv_expired_reqs",
        "Leases that ended before anybody released them.",
        lambda: leases.num_expired,
    )
    metrics.read_total(
        "vllm:nixl_num_notifications_after_expiry",
        "Releases of leases that had ended, or never were.",
        lambda: leases.num_late_releases,
    )
    metrics.read_total(
        "tandem:held_turns_taken_back",
        "Requests held for a next turn that were let go early because memory was short.",
        lambda: leases.num_taken_back,
    )
    return leases


def _identity(
    settings: ConnectorSettings,
    plan: ArenaPlan,
    digests: ArenaDigests,
    *,
    records: LeaseRecords,
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
        lease_s=settings.config.kv_connector_extra_config.kv_lease_duration,
        lease_records=records.offset,
        capabilities=digests.capabilities,
    )
