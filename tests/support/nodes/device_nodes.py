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
from tests.support.nodes.cluster import Cluster, sample, transfer_config
from tests.support.nodes.device_arena import DeviceArena
from tests.support.nodes.hand_over_checks import check_tokens_and_logprobs


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
    finally:
        for node in cluster.nodes:
            await node.close()


if __name__ == "__main__":
    faulthandler.enable()
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
