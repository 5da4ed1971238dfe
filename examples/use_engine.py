"""Generates text in this process, without a server: `python examples/use_engine.py MODEL`.

MODEL is a folder such as deploy/demo/model. These are the parts that a node puts together
(`serving/node/server.py`), with a connector that does nothing: no peers, no tiers.
"""

import asyncio
import sys
from pathlib import Path

import torch

from engine.arena import ArenaMemory
from engine.async_engine import AsyncEngine, EngineLimits
from engine.core import EngineCore
from engine.families.registry import read_config
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.manager import KVCacheManager
from engine.kv_connector import Connector, LocalAdmission, SchedulerConnector, WorkerConnector
from engine.model_configs.generation import read_eos_token_ids
from engine.models.loader import load_model
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.types import GenerateRequest, SamplingParams
from engine.worker.model_runner import ModelRunner
from serving.api.tokenizer import load_tokenizer
from serving.process import configure_logging


async def main(folder: Path) -> None:
    """Prints a prompt and the greedy text after it, as its tokens come."""
    configure_logging("warning")
    config, tokenizer = read_config(folder, "auto"), load_tokenizer(folder)
    plan = plan_arena(config.groups, 16, 64 << 20)  # blocks of 16 tokens in 64 MiB
    arena = ArenaMemory(plan.arena_bytes)
    runner = ModelRunner(load_model(folder, config, torch.device("cpu")), plan, arena)
    alone = Connector(LocalAdmission(), SchedulerConnector(), WorkerConnector())
    scheduler = Scheduler(SchedulerConfig(), KVCacheManager(plan), alone.scheduler)
    ends = frozenset(read_eos_token_ids(folder, config.vocab_size, tokenizer.eos_token_id))
    grammars = GrammarCompiler(tokenizer.to_json, config.vocab_size, ends)
    limits = EngineLimits(config.max_position_embeddings, config.vocab_size, ends, grammars)
    engine = AsyncEngine(EngineCore(scheduler, runner, alone), alone.admission, limits)
    engine.start()
    prompt = "One morning, Mia"
    request = GenerateRequest(
        request_id="1",
        prompt_token_ids=tokenizer.encode(prompt, add_special_tokens=True),
        sampling=SamplingParams(max_tokens=40, temperature=0.0),
    )
    print(prompt, end="", flush=True)
    async for output in engine.generate(request):
        print(tokenizer.decode(output.token_ids), end="", flush=True)
    print()
    await engine.close()
    await grammars.close()
    arena.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
