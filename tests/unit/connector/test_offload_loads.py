"""Loads from tiers by their bytes: what is reported as good is there."""

from functools import partial
from pathlib import Path

from connector.offload.messages import Report
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec, StatePart
from engine.step import ConnectorOutput
from tests.support.cache.bare_tiers import BareTiers
from tests.support.faults.faulty_files import FaultyFiles

MIB = 1 << 20
FULL = KVCacheGroup(FullAttentionSpec(1, 8, "float32"), (0,), 16)
STATE = KVCacheGroup(MambaSpec("mamba2", (StatePart((3, 32)), StatePart((2, 16, 8)))), (1,))
ATTENTION = plan_arena((FULL,), 16, MIB)
HYBRID = plan_arena((FULL, STATE), 16, MIB)
PROMPT = tuple(range(64))


def test_what_a_step_evicts_and_a_load_reads_stays_in_the_host_tier(tmp_path: Path) -> None:
    """The load hangs in a file before it reads what was in the arena when it started."""
    files = partial(FaultyFiles, fault="hanging")
    with BareTiers(ATTENTION, files, disk_path=str(tmp_path), disk_bytes=MIB) as bare:
        first = bare.store(PROMPT[:16], 0, [0])
        bare.write_early(PROMPT[:16])
        bare.scheduler.removed(first)
        bare.settle()
        both = bare.store(PROMPT[:32], 0, [0, 1])
        bare.scheduler.removed(bare.cached(PROMPT[:16], 0, [0]))
        files_of(bare).is_bad = True
        bare.load(PROMPT[:32], ((4, 5),))
        bare.scheduler.removed(both)  # by the same step, to make room
        bare.step()
        # Another request computes the same, and something else needs room.
        bare.store(PROMPT[:32], 0, [6, 7])
        other = bare.store(tuple(range(100, 116)), 0, [8])
        bare.scheduler.removed(other)
        bare.step()
        files_of(bare).go_on.set()
        bare.settle()
        assert len(bare.ended.loaded) == 1
        assert bare.holds(PROMPT[:32], 0, [4, 5])


def files_of(bare: BareTiers) -> FaultyFiles:
    folder = bare.worker._folder
    assert folder is not None and isinstance(folder.files, FaultyFiles)
    return folder.files


def test_what_precedes_an_item_without_a_copy_is_loaded() -> None:
    """The step that loads it evicts it, and the load itself takes all of the host tier."""
    with BareTiers(ATTENTION, host_bytes=8 * ATTENTION.block_bytes(0)) as bare:
        num_slots = bare.scheduler.slots.num_units * 4
        prompt, before = tuple(range(16 * num_slots + 16)), 16 * num_slots
        cached = bare.store(prompt, 0, range(num_slots + 1))
        bare.scheduler.removed(bare.cached(prompt[:before], 0, range(num_slots)))
        bare.settle()
        assert bare.scheduler.slots.num_items == num_slots
        bare.load(prompt, (tuple(range(100, 101 + num_slots)),))
        bare.scheduler.removed(cached)
        bare.settle()
        (failure,) = bare.ended.failed
        assert (failure.cause, failure.group) == ("evicted", 0)
        assert failure.num_good_tokens == before
        assert bare.holds(prompt[:before], 0, range(100, 100 + num_slots))


def test_what_is_evicted_and_loses_its_file_before_the_next_step_goes_to_the_host_tier(
    tmp_path: Path,
) -> None:
    with BareTiers(ATTENTION, host_bytes=MIB, disk_path=str(tmp_path), disk_bytes=MIB) as bare:
        cached = bare.store(PROMPT[:16], 0, [0])
        bare.write_early(PROMPT[:16])
        (entry,) = bare.scheduler.index
        assert entry.file is not None
        bare.scheduler.removed(cached)
        bare.scheduler.update(ConnectorOutput(message=Report(gone=(entry.file.name,))))
        bare.settle()
        bare.load(PROMPT[:16], ((4,),))
        bare.settle()
        assert bare.ended.loaded and bare.holds(PROMPT[:16], 0, [4])
