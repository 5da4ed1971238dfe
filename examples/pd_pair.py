"""Hands a prompt from a prefill node to a decode node: `python examples/pd_pair.py MODEL`.

MODEL is a folder such as deploy/demo/model. Both nodes are whole servers in this process; between
processes and hosts the same two requests go over gRPC, and a proxy makes them.
"""

import asyncio
import sys
from pathlib import Path

from msgspec.structs import replace

from connector.registry import builder_of
from engine.types import GenerateOutput, GenerateRequest, KVTransferParams, SamplingParams
from serving.api.tokenizer import load_tokenizer
from serving.config import NodeConfig
from serving.node.server import NodeServer
from serving.process import configure_logging


async def outputs(node: NodeServer, request: GenerateRequest) -> list[GenerateOutput]:
    """All outputs of one request; the last one says what became of it."""
    return [output async for output in node.engine.generate(request)]


async def main(model: str) -> None:
    """Prints where P keeps the prompt, what D pulled of it, and the text."""
    configure_logging("warning")
    config = NodeConfig(model=model, port=0, kv_cache_memory_bytes=64 << 20)
    p, d = NodeServer(config, "prefill", builder_of), NodeServer(config, "decode", builder_of)
    await p.start()
    await d.start()
    tokenizer = load_tokenizer(Path(model))
    request = GenerateRequest(
        request_id="1",
        prompt_token_ids=tokenizer.encode("One morning, Mia", add_special_tokens=True),
        sampling=SamplingParams(max_tokens=40, temperature=0.0),
        kv_transfer_params=KVTransferParams(do_remote_decode=True),
    )
    # P computes the prompt and the first token. What it answers is for D, as it is.
    prefilled = (await outputs(p, request))[-1]
    print("P keeps:", prefilled.kv_transfer_params)
    request = replace(request, kv_transfer_params=prefilled.kv_transfer_params)
    decoded = await outputs(d, request)
    print("D pulled:", decoded[-1].kv_transfer)
    token_ids = [token for output in decoded for token in output.token_ids]
    print("D generated:", tokenizer.decode(token_ids))
    await d.close()
    await p.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
