"""The gated delta rules against the float64 recurrence, held to float32's own error."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.ops.backend import GatedDeltaRule
from engine.ops.gated_delta_rule import fast, naive
from engine.ops.gated_delta_rule.native import NativeDeltaRule
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.scratch import Scratch
from tests.ops.batches import BATCHES, Batch, memory_of, moved, pool_of
from tests.ops.native import native_kernels

KEY_HEADS, KEY_DIM, VALUE_DIM = 2, 16, 24
SEGMENTS = [[1], [15], [63], [64], [65], [128], [300, 1, 77], [64, 64], [1, 1, 65]]

BY_HEAD_AND_CHANNEL = pytest.mark.parametrize(
    "by_channel", [False, True], ids=["by head", "by channel"]
)


@dataclass(slots=True, frozen=True)
class Case:
    """One random problem; decays spread from none to nearly everything."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial: Tensor

    def double(self) -> "Case":
        fields = (self.q, self.k, self.v, self.g, self.beta, self.initial)
        return Case(*(field.double() for field in fields))


def case(
    tokens: int,
    sequences: int,
    *,
    value_heads: int = 4,
    slow: bool = False,
    by_channel: bool = False,
) -> Case:
    """`slow`: decays near one; otherwise from one to nothing, down to exp(-1000) in a step."""
    draw = torch.Generator().manual_seed(tokens)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    heads = (tokens, value_heads, *[KEY_DIM][: int(by_channel)])
    g = -torch.exp(rand(*heads) * 3 - (6 if slow else 1))
    return Case(
        q=rand(tokens, KEY_HEADS, KEY_DIM),
        k=rand(tokens, KEY_HEADS, KEY_DIM),
        v=rand(tokens, value_heads, VALUE_DIM),
        g=g,
        beta=rand(tokens, value_heads).sigmoid(),
        initial=rand(sequences, value_heads, KEY_DIM, VALUE_DIM),
    )


def worst(got: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    pairs = zip(got, truth, strict=True)
    return max((a.double() - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("lens", SEGMENTS, ids=str)
@pytest.mark.parametrize(("value_heads", "slow"), [(2, True), (4, False)])
@BY_HEAD_AND_CHANNEL
def test_chunk_is_as_exact_as_the_recurrence(
    lens: list[int], *, value_heads: int, slow: bool, by_channel: bool
) -> None:
    one = case(sum(lens), len(lens), value_heads=value_heads, slow=slow, by_channel=by_channel)
    before = one.initial.clone()

    def run(op: object, c: Case) -> tuple[Tensor, Tensor]:
        chunk = naive.chunk if op is naive else fast.chunk
        o, final, _ = chunk(c.q, c.k, c.v, c.g, beta=c.beta, query_lens=lens, initial=c.initial)
        return o, final

    truth = run(naive, one.double())
    limit = 8 * worst(run(naive, one), truth) + 1e-6
    assert worst(run(fast, one), truth) < limit
    assert torch.equal(one.initial, before)


@pytest.mark.parametrize("sequences", [1, 3, 9])
@pytest.mark.parametrize("value_heads", [2, 4])
@BY_HEAD_AND_CHANNEL
def test_step_equals_naive_and_moves_only_its_view(
    sequences: int, value_heads: int, by_channel: bool
) -> None:
    c = case(sequences, sequences, value_heads=value_heads, by_channel=by_channel)
    stride = c.initial[0].numel() + 50
    arena = torch.full((sequences, stride), 7.0)
    view = arena.as_strided(c.initial.shape, (stride, *c.initial.stride()[1:]), 13)
    view.copy_(c.initial)
    expected = naive.step(c.q, c.k, c.v, c.g, beta=c.beta, state=c.initial)
    got = fast.step(c.q, c.k, c.v, c.g, beta=c.beta, state=view, scratch=Scratch())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(view, c.initial, rtol=1e-5, atol=1e-5)
    view.fill_(7.0)
    assert torch.equal(arena, torch.full_like(arena, 7.0))


@BY_HEAD_AND_CHANNEL
def test_a_sequence_may_be_cut_anywhere(by_channel: bool) -> None:
    c = case(250, 1, by_channel=by_channel)
    whole, final, _ = fast.chunk(
        c.q, c.k, c.v, c.g, beta=c.beta, query_lens=[250], initial=c.initial
    )
    state, outputs, start = c.initial, [], 0
    for n in (50, 1, 64, 135):
        at = slice(start, start + n)
        o, state, _ = fast.chunk(
            c.q[at], c.k[at], c.v[at], c.g[at], beta=c.beta[at], query_lens=[n], initial=state
        )
        outputs.append(o)
        start += n
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-4)


def by_torch(dtype: torch.dtype) -> GatedDeltaRule:
    return partial(fast.gated_delta_rule, scratch=Scratch())


def native(dtype: torch.dtype) -> GatedDeltaRule:
    return NativeDeltaRule(native_kernels(dtype))


def drawn(
    tokens: int, dtype: torch.dtype, *, dk: int, dv: int, by_channel: bool
) -> tuple[list[Tensor], DeltaRuleParameters]:
    """q, k, v, a and b, slices of one product, and parameters from hardly to at once forgetting."""
    draw, heads = torch.Generator().manual_seed(dk), 4
    of_heads = (heads, dk) if by_channel else (heads,)
    shapes = [(KEY_HEADS, dk), (KEY_HEADS, dk), (heads, dv), of_heads, (heads,)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    joined = torch.randn(tokens, 3 + sum(sizes), generator=draw).to(dtype)[:, 3:]
    parts = zip(joined.split_with_sizes(sizes, dim=1), shapes, strict=True)
    parameters = DeltaRuleParameters(
        rate=-torch.tensor([1e-3, 0.1, 2.0, 9.0]),
        dt_bias=torch.randn(of_heads, generator=draw) * 8.0,
        beta_scale=2.0,
    )
    return [part.view(-1, *shape) for part, shape in parts], parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [by_torch, native], ids=["torch", "native"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("dk", "dv"), [(10, 6), (37, 147)])
@BY_HEAD_AND_CHANNEL
def test_a_batch_is_what_naive_makes_of_it(
    make: Callable[[torch.dtype], GatedDeltaRule],
    dtype: torch.dtype,
    batch: Batch,
    *,
    dk: int,
    dv: int,
    by_channel: bool,
) -> None:
    """Rows are slices of one product, and the pool holds other numbers between its units."""
    (q, k, v, a, b), parameters = drawn(batch.tokens, dtype, dk=dk, dv=dv, by_channel=by_channel)
    ours, theirs = (pool_of((v.shape[1], dk, dv), torch.float32) for _ in range(2))
    found = make(dtype)(q, k, v, a, b, ours, batch.index(), parameters=parameters)
    g, beta = naive.rates(a, b, parameters)
    truth = partial(naive.chunk, q, k, v, g, beta=beta)
    wanted = moved(
        theirs,
        batch,
        lambda lens, states, exports: truth(query_lens=lens, initial=states, exports=exports),
    )
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(memory_of(ours), memory_of(theirs), rtol=2e-5, atol=2e-5)


@BY_HEAD_AND_CHANNEL
def test_neither_threads_nor_a_cut_after_a_whole_group_change_a_bit(by_channel: bool) -> None:
    kernels = native_kernels()
    rows, parameters = drawn(71, torch.float32, dk=37, dv=147, by_channel=by_channel)
    pools = []
    outputs = []
    for threads, lens in [(1, [71]), (3, [36, 4, 31])]:
        kernels.threads = threads
        pool = pool_of((4, 37, 147), torch.float32)
        parts = zip(*(row.split_with_sizes(lens) for row in rows), strict=True)
        run = partial(NativeDeltaRule(kernels), pool=pool, parameters=parameters)
        outputs.append(
            torch.cat([run(*part, index=Batch(0, [len(part[0])], [3]).index()) for part in parts])
        )
        pools.append(memory_of(pool))
    assert torch.equal(*outputs)
    assert torch.equal(*pools)
