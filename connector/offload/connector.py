"""OffloadConnector: the one place where the parts of the tiers are put together."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.config import OffloadConfig
from connector.offload.host_slots import HostSlots
from connector.offload.metrics import COUNTERS, FOLDER_GAUGES, INDEX_GAUGES, SLOT_GAUGES
from connector.offload.scheduler import OffloadScheduler
from connector.offload.stats import OffloadStats
from connector.offload.tiers.arena_items import ArenaItems
from connector.offload.tiers.files import Files
from connector.offload.tiers.folder import Folder
from connector.offload.worker import OffloadWorker
from engine.arena import ArenaMemory
from engine.errors import ConfigError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_connector import Connector, LocalAdmission
from serving.config import KVTransferConfig, decode_config
from serving.metrics import NodeMetrics
from serving.node.connector import ConnectorSettings
from serving.rpc.server import RpcService

log = structlog.get_logger()

SOURCE = "kv_transfer_config.kv_connector_extra_config"
LEAST_ITEMS = 8
"""A tier of fewer items than this would throw out one part of a prompt for the next."""
UNIT_BYTES = 2 << 20
STAGING_UNITS = 8
"""Without a host tier, memory for what is on its way to the disk."""


@dataclass(slots=True, frozen=True)
class OffloadConnector:
    """A node's tiers; see `serving.node.connector.NodeConnector`."""

    scheduler: OffloadScheduler
    worker: OffloadWorker

    @property
    def connector(self) -> Connector:
        """Its sides. No request names a tier."""
        return Connector(LocalAdmission(), self.scheduler, self.worker)

    def services(self) -> Sequence[RpcService]:
        """None: nodes share a folder, and nothing else."""
        return ()

    def advertise(self, port: int) -> None:
        """Nobody asks this node."""

    def is_awaited(self) -> bool:
        """Nobody waits for a tier."""
        return False

    def link_bytes_per_s(self) -> float:
        """Tiers are not reached over a link."""
        return 0.0

    def close(self) -> None:
        """What is not on disk is written, as far as `flush_timeout_seconds` reach."""
        self.worker.end(self.scheduler.writes.last())


@dataclass(slots=True, frozen=True)
class OffloadBuilder:
    """Builds the OffloadConnector of one node (`serving.node.connector.ConnectorBuilder`).

    `open_files`: the calls to the file system, by folder.
    """

    config: OffloadConfig
    open_files: Callable[[Path], Files] = Files

    @classmethod
    def of(cls, config: KVTransferConfig) -> "OffloadBuilder":
        """Raises ConfigError for an extra config that is none of the OffloadConnector's."""
        return cls(decode_config(config.kv_connector_extra_config, OffloadConfig, SOURCE))

    def __call__(
        self,
        settings: ConnectorSettings,
        plan: ArenaPlan,
        arena: ArenaMemory,
        *,
        metrics: NodeMetrics,
        wake: Callable[[], None],
    ) -> OffloadConnector:
        """Raises ConfigError for tiers that could not be of use, naming sizes that can."""
        config, stats = self.config, OffloadStats()
        chunks = ChunkPlan(plan, config.hybrid_chunk_size)
        warn_of_long_chunks(chunks, settings.max_model_len)
        slots = slots_of(chunks, config)
        folder = self._folder(
            lambda: chunks.geometry(settings.identity().digest, settings.prefix_hash_seed), stats
        )
        with ExitStack() as stack:
            host = ArenaMemory(slots.num_units * slots.unit_bytes)
            stack.callback(host.close)
            metrics.read(stats, counters=COUNTERS)
            metrics.read(slots, gauges=SLOT_GAUGES)
            if folder is not None:
                metrics.read(folder, gauges=FOLDER_GAUGES)
            scheduler = OffloadScheduler(
                chunks, slots, config, stats=stats, tiers=settings.tiers, wake=wake
            )
            metrics.read(scheduler.index, gauges=INDEX_GAUGES)
            items = ArenaItems(chunks, arena)
            worker = OffloadWorker(items, host, folder, config=config, stats=stats, wake=wake)
            stack.pop_all()
        log.info(
            "KV is offloaded",
            host_bytes=config.host_bytes,
            disk_path=config.disk_path,
            disk_bytes=config.disk_bytes,
            chunk_tokens=sorted(set(chunks.chunk_tokens.values())),
        )
        return OffloadConnector(scheduler, worker)

    def _folder(self, geometry: Callable[[], str], stats: OffloadStats) -> Folder | None:
        path = self.config.disk_path
        if path is None:
            return None
        try:
            files = self.open_files(Path(path))
            files.check()
            is_open = files.is_open_to_others()
        except OSError as error:
            raise ConfigError(
                f"disk_path {path!r} cannot be used: {error}; name a folder that this user may "
                "write to"
            ) from error
        if is_open:
            log.warning(
                "other users may enter the tier's folder; its files, which hold prompts, are for "
                f"this user alone, but older ones may not be: chmod -R go= {path}",
                disk_path=path,
            )
        return Folder(files, geometry, self.config.disk_bytes, stats=stats)


def warn_of_long_chunks(chunks: ChunkPlan, max_model_len: int) -> None:
    """Says so at start if only whole prompts can be found again."""
    longest = max(chunks.chunk_tokens.values(), default=0)
    if longest > max_model_len:
        # No prompt has a whole chunk then: it is found only by those that repeat all of it.
        log.warning(
            "no prompt fills a chunk of the tiers, so prompts that share a prefix find nothing; "
            "set a smaller --block-size, or hybrid_chunk_size",
            chunk_tokens=longest,
            max_model_len=max_model_len,
            hybrid_chunk_size=chunks.arena.hash_block_size,
        )


def slots_of(chunks: ChunkPlan, config: OffloadConfig) -> HostSlots:
    """The slots of the host tier, or of a staging for the disk tier."""
    sizes = chunks.slot_bytes()
    largest = max(sizes.values())
    for name, nbytes in (("host_bytes", config.host_bytes), ("disk_bytes", config.disk_bytes)):
        if 0 < nbytes < LEAST_ITEMS * largest:
            raise ConfigError(
                f"{SOURCE}: {name} {nbytes} holds {nbytes // largest} of this model's largest "
                f"items, which have {largest} bytes; give at least {LEAST_ITEMS * largest}"
            )
    room = max(largest, min(UNIT_BYTES, config.host_bytes // 16 or UNIT_BYTES))
    unit_bytes = -(-room // 4096) * 4096
    num_units = max(config.host_bytes // unit_bytes, STAGING_UNITS)
    return HostSlots(num_units, unit_bytes, sizes)
