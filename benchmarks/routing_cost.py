"""`python -m benchmarks.routing_cost`: what routing costs the proxy, in time and memory.

The real index, in-flight prompts and policy, 100 nodes, prompts of 8,192 tokens, hash blocks of 16.
"""

import time
import timeit
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from itertools import islice
from statistics import median

import msgspec

from engine.kv_events.wire import GPU, BlockStored, Event
from engine.rpc.messages import KVEventsInfo, KVGroupInfo, NodeInfo
from engine.types import GenerateRequest
from proxy.cluster.node import NodeView
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import HashKey, RoutedPrompt
from proxy.routing.router import Router

SIZE, NUM_TOKENS, NUM_NODES = 16, 8192, 100
NUM_BLOCKS, BATCH = 1_000_000, 64
INFO = KVEventsInfo(
    endpoint="inproc://none",
    topic="",
    hash_block_size=SIZE,
    hash_seed="",
    groups=(KVGroupInfo(kind="full_attention"), KVGroupInfo(kind="mamba")),
)


def view(number: int) -> NodeView:
    info = NodeInfo(
        engine_id=f"engine-{number}",
        kind="decode",
        model_names=("tiny",),
        max_model_len=131_072,
        vocab_size=32_000,
        num_waiting_tokens=1000 * (number % 3),
        prefill_tokens_per_s=8000.0 + number,
        decode_tokens_per_s=900.0,
        link_bytes_per_s=1e9,
        kv_bytes_per_token=32_768,
        state_bytes=50_000_000,
        kv_events=INFO,
    )
    return NodeView(f"http://10.0.0.{number}:8000", info, num_in_flight=number % 5)


def prompt_of(request: GenerateRequest) -> RoutedPrompt:
    prompt = RoutedPrompt(request)
    prompt.boundaries(HashKey.of(INFO))  # hashed here, apart from what is timed
    return prompt


def timed(work: Callable[[], object], repeats: int = 200) -> float:
    """The median seconds of one call."""
    return median(timeit.repeat(work, number=1, repeat=repeats))


def decision(num_holders: int, num_shared: int) -> None:
    """`num_holders` nodes hold each another length of one prompt.

    100 other prompts are under way, whose first `num_shared` tokens are those of the prompt.
    """
    nodes, index = [view(number) for number in range(NUM_NODES)], PrefixIndex()
    request = GenerateRequest(request_id="r", prompt_token_ids=tuple(range(NUM_TOKENS)))
    prompt = prompt_of(request)
    digests = prompt.boundaries(HashKey.of(INFO))
    for number, node in enumerate(nodes):
        index.set_node(node.name, INFO)
        if number % (NUM_NODES // num_holders):
            continue
        end = len(digests) * (number + 1) // NUM_NODES
        blocks = BlockStored(tuple(digests[1:end]), None, (), SIZE, medium=GPU, group_idx=0)
        state = BlockStored((digests[end - 1],), None, (), SIZE, medium=GPU, group_idx=1)
        index.apply(node.name, [blocks, state])
    router, half = Router("prefix_aware", index), NUM_NODES // 2
    expected = ExitStack()
    for number, node in enumerate(nodes):
        tokens = (*range(num_shared), *[NUM_TOKENS + number] * (4096 - num_shared))
        other = GenerateRequest(request_id="o", prompt_token_ids=tokens)
        expected.enter_context(router.expecting(prompt_of(other), node))

    def decide() -> None:
        prompt.hits = index.hits(prompt)
        router.choose(prompt, nodes[:half], nodes[half:])

    print(f"{num_holders} of {NUM_NODES} nodes hold some, {num_shared} tokens are under way")
    print(f"  hashing {NUM_TOKENS} tokens {1e6 * timed(lambda: prompt_of(request)):8.0f} us")
    print(f"  index                {1e6 * timed(lambda: index.hits(prompt)):8.0f} us")
    print(f"  decision             {1e6 * timed(decide):8.0f} us")
    expected.close()


def events() -> None:
    """One node announces a million blocks, 64 in each event."""
    hashes = (sha256(number.to_bytes(4)).digest() for number in range(NUM_BLOCKS))
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Event])
    tokens, payloads = tuple(range(BATCH * SIZE)), []
    while part := tuple(islice(hashes, BATCH)):
        event = BlockStored(part, None, tokens, SIZE, medium=GPU, group_idx=0)
        payloads.append(encoder.encode([event]))
    for is_traced in (False, True):  # apart, since tracing takes most of the time
        index = PrefixIndex()
        index.set_node("a", INFO)
        if is_traced:
            tracemalloc.start()
        start = time.perf_counter()
        for payload in payloads:
            index.apply("a", decoder.decode(payload))
        rate = NUM_BLOCKS / (time.perf_counter() - start)
        if not is_traced:
            print(f"block events           {rate:8,.0f} per second, with decoding")
    print(f"index                  {tracemalloc.get_traced_memory()[0]:8,.0f} bytes per million")


if __name__ == "__main__":
    decision(NUM_NODES, 2048)  # as bad as it gets
    decision(10, 2048)
    decision(10, 0)
    events()
