"""Requests of the simulated proxy: records of a workload, hashed once, at their own times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.cache.decode_replay import HandOver, hand_overs
from benchmarks.cache.prefill_replay import Prompt
from benchmarks.workloads.conversation import conversation
from benchmarks.workloads.documents import documents
from benchmarks.workloads.streams import HOUR_S, SYSTEM, Draw
from benchmarks.workloads.traces import BlockIds, Record, arrivals, ideal_hits
from engine.kv_cache.prefix import PrefixHasher
from engine.types import GenerateRequest
from proxy.routing.prompt import HashKey, RoutedPrompt


@dataclass(slots=True, frozen=True)
class Request:
    """One request: `at` seconds, its prompt as P and D see it, tokens of its answer."""

    at: float
    prompt: Prompt
    hand_over: HandOver
    output_length: int
    session_id: str | None


class DigestedPrompt(RoutedPrompt):
    """A prompt for the real index and policies, with the digests that its caches use as well."""

    def __init__(self, request: Request) -> None:
        session = request.session_id
        super().__init__(GenerateRequest(request_id="r", prompt_token_ids=(0,), session_id=session))
        self.num_tokens = request.prompt.num_tokens
        self._prefix_digests = request.prompt.prefix

    def boundaries(self, key: HashKey) -> list[bytes]:
        return self._prefix_digests.boundaries()

    def digest(self, key: HashKey, num_tokens: int) -> bytes:
        return self._prefix_digests.digest_at(num_tokens)


def requests_of(records: Sequence[Record], hash_block_size: int) -> list[Request]:
    """All records, hashed; those with equal stamps spread until the next one."""
    hasher, made = PrefixHasher(hash_block_size), []
    pulls, ideals = hand_overs(records, hasher), ideal_hits(records)
    for at, record, pull, ideal in zip(arrivals(records), records, pulls, ideals, strict=True):
        pull.prefix.boundaries()
        session = None if record.session_id is None else str(record.session_id)
        prompt = Prompt(pull.prefix, record.input_length, ideal)
        made.append(Request(at, prompt, pull, record.output_length, session))
    return made


def one_shared_block(scale: float, seed: int) -> list[Record]:
    """The trap: 3.4 requests each second that share 512 tokens, and nothing else."""
    draw, ids, at = Draw(seed), BlockIds(), 0.0
    records = []
    while (at := at + draw.random.expovariate(3.4 * scale)) < HOUR_S:
        segments = (SYSTEM, draw.text(draw.lognormal(2000, 0.8)))
        size, blocks = sum(size for _, size in segments), ids.of(segments)
        records.append(Record(1000 * at, size, draw.output(), blocks, segments=segments))
    return records


GENERATORS: Mapping[str, tuple[Callable[[float, int], list[Record]], float]] = MappingProxyType(
    {
        "G1 conversation": (conversation, 1.0),
        "G2 documents": (documents, 0.4),
        "one shared block": (one_shared_block, 0.4),
    }
)
"""By name the generator and its scale for 8 nodes, which leaves a few requests per second."""
