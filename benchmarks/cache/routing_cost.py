"""`python -m benchmarks.cache.routing_cost`: what routing costs the proxy, in time and memory.

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
import typer

from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import grouped_bars
from engine.types import GenerateRequest
from proxy.cluster.node import NodeView
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import HashKey, RoutedPrompt
from proxy.routing.router import Router
from serving.kv_events.wire import GPU, BlockStored, Event
from serving.rpc.messages import KVEventsInfo, KVGroupInfo, NodeInfo

SIZE, NUM_TOKENS, NUM_NODES = 16, 8192, 100
NUM_BLOCKS, QUICK_BLOCKS, BATCH = 1_000_000, 16_000, 64
REPEATS, QUICK_REPEATS = 200, 20
CASES = ((NUM_NODES, 2048), (10, 2048), (10, 0))
"""Nodes that hold some of the prompt, the first as bad as it gets; tokens shared with others."""
SECONDS = (120, 20)
HEADERS = ("case", "hashing", "index", "decision")
INDEX_HEADERS = ("events", "block events per second", "index, MB")
INFO = KVEventsInfo(
    endpoint="inproc://none",
    hash_block_size=SIZE,
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


def timed(work: Callable[[], object], repeats: int) -> float:
    """The median seconds of one call."""
    return median(timeit.repeat(work, number=1, repeat=repeats))


def decision(num_holders: int, num_shared: int, repeats: int) -> dict[str, float]:
    """Microseconds where `num_holders` nodes hold each another length of one prompt.

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

    def decide() -> None:
        prompt.hits = index.hits(prompt)
        router.choose(prompt, nodes[:half], nodes[half:])

    with ExitStack() as expected:
        for number, node in enumerate(nodes):
            tokens = (*range(num_shared), *[NUM_TOKENS + number] * (4096 - num_shared))
            other = GenerateRequest(request_id="o", prompt_token_ids=tokens)
            expected.enter_context(router.expecting(prompt_of(other), node))
        works = {
            "hashing": lambda: prompt_of(request),
            "index": lambda: index.hits(prompt),
            "decision": decide,
        }
        return {name: 1e6 * timed(work, repeats) for name, work in works.items()}


def events(num_blocks: int) -> tuple[float, int]:
    """Block events per second of one node, 64 blocks in each; bytes of the index afterwards."""
    hashes = (sha256(number.to_bytes(4)).digest() for number in range(num_blocks))
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Event])
    tokens, payloads = tuple(range(BATCH * SIZE)), []
    while part := tuple(islice(hashes, BATCH)):
        event = BlockStored(part, None, tokens, SIZE, medium=GPU, group_idx=0)
        payloads.append(encoder.encode([event]))
    rate = 0.0
    for is_traced in (False, True):  # apart, since tracing takes most of the time
        index = PrefixIndex()
        index.set_node("a", INFO)
        if is_traced:
            tracemalloc.start()
        start = time.perf_counter()
        for payload in payloads:
            index.apply("a", decoder.decode(payload))
        rate = rate or num_blocks / (time.perf_counter() - start)
    return rate, tracemalloc.get_traced_memory()[0]


def main(*, quick: report.Quick = False, out: report.Out = report.RESULTS) -> None:
    """Microseconds of hashing, index and decision; block events per second; bytes of the index."""
    found = report.Report("routing_cost", out, SECONDS, cpu="all", quick=quick)
    repeats, num_blocks = (QUICK_REPEATS, QUICK_BLOCKS) if quick else (REPEATS, NUM_BLOCKS)
    micros: dict[str, dict[str, float]] = {}
    with report.progress(found.console, len(CASES) + 1) as describe:
        for holders, shared in CASES:
            case = f"{holders} of {NUM_NODES} hold some, {shared:,} tokens under way"
            done = describe(case)
            micros[case] = decision(holders, shared, repeats)
            done()
        done = describe("events")
        rate, nbytes = events(num_blocks)
        done()
    note = (
        f"prompts of {NUM_TOKENS:,} tokens, hash blocks of {SIZE}; {machine.describe(found.host)}"
    )
    rows = [[case, *(f"{us:.0f}" for us in row.values())] for case, row in micros.items()]
    found.publish("Routing, microseconds", headers=HEADERS, rows=rows, note=note)
    row = [f"{num_blocks:,} blocks", f"{rate:,.0f}", f"{nbytes / 1e6:,.0f}"]
    found.publish("Index", headers=INDEX_HEADERS, rows=[row], note=note)
    bars = {part: [Spread.of([row[part]]) for row in micros.values()] for part in HEADERS[1:]}
    grouped_bars(found.plot(), list(micros), bars, ylabel="us")
    found.save({"micros": micros, "events_per_s": rate, "index_bytes": nbytes})


if __name__ == "__main__":
    typer.run(main)
