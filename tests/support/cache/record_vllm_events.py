"""Records KV events of vLLM's own cache manager for a hybrid, without a model.

Runs in an environment that has vLLM 0.32 and not this project:

    python tests/support/cache/record_vllm_events.py tests/unit/proxy/vllm_hybrid_events.msgpack

Requests run one after the other in a cache that is too small for all of them, in chunks that end at
block boundaries as vLLM's scheduler cuts them for Mamba. The file has the prompts, with vLLM's hash
of each prefix, and for each step the batch as it is published and the hit that vLLM's own lookup
then finds for each prompt.
"""

# vLLM is not installed where this is checked.
# mypy: disable-error-code="import-not-found"

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm import SamplingParams
from vllm.distributed.kv_events import KVEventBatch
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

SIZE, HASH_SIZE, CHUNK, NUM_BLOCKS, NUM_REQUESTS = 16, 4, 32, 48, 45


def manager(retention: int | None) -> Any:
    """A cache of one group of attention and two of Mamba, which keeps checkpoints when aligned."""
    full = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(
        block_size=SIZE,
        shapes=((4, 8),),
        dtypes=(torch.float32,),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align",
    )
    specs = [("a", full), ("b", state), ("c", state)]
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in specs],
        prefix_cache_retention_interval=retention,
        hash_block_size=HASH_SIZE,
    )
    return KVCacheManager(config, 1024, SIZE, HASH_SIZE, enable_kv_cache_events=True)


def prompts() -> list[tuple[str | None, list[int]]]:
    """Salts and tokens; some begin as others do, and two differ in their salt alone."""
    rng = random.Random(32)
    texts: list[list[int]] = []
    for _ in range(14):
        shared = rng.choice(texts)[: rng.randrange(120)] if texts and rng.random() < 0.7 else []
        texts.append([*shared, *(rng.randrange(9) for _ in range(rng.randrange(10, 100)))][:180])
    return [*((None, text) for text in texts), ("salt", texts[0]), ("salt", texts[1])]


def made(number: int, salt: str | None, tokens: list[int], hasher: Any) -> Any:
    """A request as the scheduler has it."""
    params = SamplingParams(max_tokens=4)
    return Request(str(number), tokens, params, None, cache_salt=salt, block_hasher=hasher)


def steps(cache: Any, request: Any) -> Iterator[None]:
    """Computes a prompt chunk by chunk, and frees it."""
    blocks, hit, _ = cache.get_computed_blocks(request)
    done, is_first = hit, True
    while done < request.num_tokens:
        end = min(done + CHUNK, request.num_tokens)
        if end < request.num_tokens or end // SIZE * SIZE > done:
            end = end // SIZE * SIZE
        got = cache.allocate_slots(
            request, end - done, hit if is_first else 0, blocks if is_first else None
        )
        assert got is not None
        done, is_first = end, False
        request.num_computed_tokens = done
        cache.new_step_starts()
        yield
    cache.free(request)
    yield


def main(out: str) -> None:
    """Writes the recording."""
    init_none_hash(sha256_cbor)
    hasher, rng, texts = (
        get_request_block_hasher(HASH_SIZE, sha256_cbor),
        random.Random(3),
        prompts(),
    )
    asking = [made(1000 + number, *text, hasher) for number, text in enumerate(texts)]
    recorded: list[dict[str, Any]] = []
    for retention in (None, 0):
        cache = manager(retention)
        for number in range(NUM_REQUESTS):
            request = made(number, *rng.choice(texts), hasher)
            for _ in steps(cache, request):
                if events := cache.take_events():
                    batch = KVEventBatch(ts=float(len(recorded)), events=events)
                    hits = [cache.get_computed_blocks(each)[1] for each in asking]
                    recorded.append({"payload": msgspec.msgpack.encode(batch), "hits": hits})
        assert cache.reset_prefix_cache()
        batch = KVEventBatch(ts=float(len(recorded)), events=cache.take_events())
        recorded.append({"payload": msgspec.msgpack.encode(batch), "hits": [0] * len(asking)})
    named = [
        {
            "salt": salt,
            "tokens": tokens,
            "hashes": [maybe_convert_block_hash(each) for each in request.block_hashes],
        }
        for (salt, tokens), request in zip(texts, asking, strict=True)
    ]
    head = {"block_size": SIZE, "hash_block_size": HASH_SIZE, "prompts": named, "steps": recorded}
    Path(out).write_bytes(msgspec.msgpack.encode(head))


if __name__ == "__main__":
    main(sys.argv[1])
