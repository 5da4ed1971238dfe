"""OffloadConnector: the one place where the parts of the tiers are put together."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.config import OffloadConfig
from connector.offload.host_slots import HostSlots
from connector.offload.metrics import (
    COUNTERS,
    FOLDER_GAUGES,
    INDEX_GAUGES,
    SLOT_GAUGES,
    OffloadStats,
)
from connector.offload.scheduler import OffloadScheduler
from connector.offload.tiers.arena_items import ArenaItems
from connector.offload.tiers.folder import Folder
from connector.offload.tiers.tier_file import Files
from connector.offload.worker import OffloadWorker
from engine.arena import ArenaMemory
from engine.errors import ConfigError
from engine.kv_connector import Connector, LocalAdmission
from serving.config import KVTransferConfig, decode_config
from serving.node.connector import BuilderOf, NodeConnector, NodeParts

log = structlog.get_logger()

SOURCE = "kv_transfer_config.kv_connector_extra_config"
LEAST_ITEMS = 8
"""A tier of fewer items than this would throw out one part of a prompt for the next."""
UNIT_BYTES = 2 << 20
STAGING_UNITS = 8
"""Without a host tier, memory for what is on its way to the disk."""


@dataclass(frozen=True)
class OffloadConnector(NodeConnector):
    """A node's tiers. No request names one; nodes share a folder, and nothing else."""

    connector: Connector
    scheduler: OffloadScheduler
    worker: OffloadWorker

    @classmethod
    def builder(
        cls,
        config: KVTransferConfig,
        builder_of: BuilderOf | None = None,
        *,
        open_files: Callable[[Path], Files] = Files,
    ) -> Callable[[NodeParts], Self]:
        """`open_files`: the calls to the file system, by folder."""
        options = decode_config(config.kv_connector_extra_config, OffloadConfig, SOURCE)
        return lambda node: cls._built(options, node, open_files)

    @classmethod
    def _built(
        cls, config: OffloadConfig, node: NodeParts, open_files: Callable[[Path], Files]
    ) -> Self:
        """Raises ConfigError for tiers that could not be of use, naming sizes that can."""
        metrics, stats = node.metrics, OffloadStats()
        chunks = ChunkPlan(node.plan, config.hybrid_chunk_size)
        warn_of_long_chunks(chunks, node.max_model_len)
        slots = slots_of(chunks, config)
        folder = None
        if config.disk_path is not None:
            folder = Folder(
                open_folder(config.disk_path, open_files),
                lambda: chunks.geometry(node.identity().digest, node.prefix_hash_seed),
                config.disk_bytes,
                stats=stats,
            )
        host = ArenaMemory(slots.num_units * slots.unit_bytes)
        node.resources.callback(host.close)
        metrics.read(stats, counters=COUNTERS)
        metrics.read(slots, gauges=SLOT_GAUGES)
        if folder is not None:
            metrics.read(folder, gauges=FOLDER_GAUGES)
        scheduler = OffloadScheduler(
            chunks, slots, config, stats=stats, tiers=node.tiers, wake=node.wake
        )
        metrics.read(scheduler.index, gauges=INDEX_GAUGES)
        items = ArenaItems(chunks, node.arena)
        worker = OffloadWorker(items, host, folder, config=config, stats=stats, wake=node.wake)
        # Until then all is written that is not on disk, as far as `flush_timeout_seconds` reach.
        node.resources.callback(lambda: worker.end(scheduler.writes.last()))
        log.info(
            "KV is offloaded",
            host_bytes=config.host_bytes,
            disk_path=config.disk_path,
            disk_bytes=config.disk_bytes,
            chunk_tokens=sorted(set(chunks.chunk_tokens.values())),
        )
        return cls(Connector(LocalAdmission(), scheduler, worker), scheduler, worker)


def open_folder(path: str, open_files: Callable[[Path], Files] = Files) -> Files:
    """The tier's folder. Raises ConfigError if this node cannot use it."""
    try:
        files = open_files(Path(path))
        files.check()
        is_open = files.is_open_to_others()
    except OSError as error:
        raise ConfigError(
            f"disk_path {path!r} cannot be used: {error}; name a folder that this user may write to"
        ) from error
    if is_open:
        log.warning(
            "other users may enter the tier's folder; its files, which hold prompts, are for "
            f"this user alone, but older ones may not be: chmod -R go= {path}",
            disk_path=path,
        )
    return files


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
