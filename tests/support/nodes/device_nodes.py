"""`python -m tests.support.nodes.device_nodes FOLDER TRANSPORT`: a hand-over as between devices.

A process of its own, because a touch of the arena that nobody declared ends it (`device_arena`).
"""

import asyncio
import faulthandler
import sys
from pathlib import Path

from engine.step import SchedulerOutput
from engine.worker.model_runner import ModelRunner, StepResults
from serving.node import server
from tests.e2e.test_prefix_cache import room_for
from tests.support.cache.offload import start_with_tiers, tier_config, tiers_settled
from tests.support.nodes.cluster import Cluster, generate, sample, transfer_config
from tests.support.nodes.device_arena import DeviceArena
from tests.support.nodes.hand_over_checks import check_tokens_and_logprobs
from tests.support.nodes.pairs import prompt_of, request_of


class DeviceRunner(ModelRunner):
    """The model's operators, and its own zeroing and copies, run on the device."""

    def prepare(self, output: SchedulerOutput) -> None:
        assert isinstance(self.arena, DeviceArena)
        with self.arena.kernels():
            super().prepare(output)

    def launch(self, output: SchedulerOutput) -> StepResults:
        assert isinstance(self.arena, DeviceArena)
        with self.arena.kernels():
            return super().launch(output)


async def main(folder: Path, transport: str) -> None:
    """Tokens and log-probabilities are those of one node, and every byte was verified."""
    vars(server).update(ArenaMemory=DeviceArena, ModelRunner=DeviceRunner)
    cluster = Cluster([])
    try:
        config = transfer_config(transport)
        p, d = await cluster.pair(folder, config)
        await check_tokens_and_logprobs(p, d)
        assert sample(d, "tandem:kv_verified_bytes_total") > 0
        assert DeviceArena.num_marks > 0
        assert sample(d, "tandem:kv_unverified_transfers_total") == 0
        await check_tiers(cluster, folder)
    finally:
        for node in cluster.nodes:
            await node.close()


async def check_tiers(cluster: Cluster, folder: Path) -> None:
    """A prompt that was evicted comes back from the host's memory, and its tokens are the same."""
    config = tier_config(host_bytes=8 << 20)
    memory = room_for(folder, 1)
    node = await start_with_tiers(cluster, folder, config, kv_cache_memory_bytes=memory)
    prompt, others = prompt_of(100), [prompt_of(150, salt=salt) for salt in range(1, 5)]
    first, *_ = [await generate(node, request_of(one)) for one in (prompt, *others)]
    before = node.engine.core.scheduler.stats.external_hits
    again = await generate(node, request_of(prompt))
    assert node.engine.core.scheduler.stats.external_hits > before
    assert again.token_ids == first.token_ids
    await tiers_settled(node)


if __name__ == "__main__":
    faulthandler.enable()
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
