"""Attention over pages: decodes in one pass over K and V, each prefill segment in blocks."""

from torch import Tensor

from engine.forward import AttentionCache, AttentionIndex
from engine.native.kernels import Kernels, pointer


class NativeAttention:
    """See `backend.PagedAttention`; pages of the kernels' dtype.

    Scores and sums are float32, and so are a decode's weights; a segment's have the pages' dtype. A
    result depends on its sequence alone.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._run = kernels.attention
        self._run_segment = kernels.attention_segment
        self._empty = kernels.empty
        self._threads = kernels.threads

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: AttentionCache,
        index: AttentionIndex,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        rows, heads, dim = q.shape
        _, kv_heads, block_size, _ = cache.k_pages.shape
        decodes = index.lens.num_decodes
        y = self._empty((rows, heads * dim), q.dtype)
        self._run(
            *_rows(q),
            *_rows(k),
            *((0, 0, 0) if v is None else _rows(v)),
            pointer(cache.k_pages),
            pointer(cache.v_pages),
            *(rows, decodes, heads, kv_heads, dim, block_size),
            pointer(index.slot_mapping),
            pointer(index.block_tables),
            index.block_tables.stride(0),
            pointer(index.positions),
            scale,
            window or 0,
            pointer(y),
            self._threads,
        )
        lens, start = index.lens, decodes
        for segment in range(decodes, len(lens.query_lens)):
            tokens = lens.query_lens[segment]
            self._run_segment(
                *_rows(q[start:]),
                pointer(cache.k_pages),
                pointer(cache.v_pages),
                *(tokens, heads, kv_heads, dim, block_size),
                pointer(index.block_tables[segment]),
                lens.context_lens[segment],
                scale,
                window or 0,
                pointer(y[start:]),
                self._threads,
            )
            start += tokens
        return y


def _rows(x: Tensor) -> tuple[int, int, int]:
    """[T, heads, dim]: its address, and how many numbers apart its rows and its heads are."""
    return x.data_ptr(), x.stride(0), x.stride(1)
