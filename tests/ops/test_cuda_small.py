"""Triton's small operators, in its interpreter and float32, against those that are written out.

Rows lie apart, and so may channels; NaN lies between them.
"""

from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_configs.feed_forward import Activation
from engine.model_configs.recurrent import Gating
from engine.ops.activation.naive import activation
from engine.ops.backend import cuda_ops
from engine.ops.gate import naive as naive_gate
from engine.ops.gated_norm.naive import gated_norm
from engine.ops.lookup import naive as naive_lookup
from engine.ops.norm.naive import norm
from engine.ops.rotary import naive as naive_rotary
from tests.ops.test_activation import gelu, squared_relu
from tests.tiers import everyday

OPS = cuda_ops()
EPS = 1e-3
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered"
)
SEEDS = everyday(range(12), [6, 10])


def size_of(draw: Random) -> int:
    """Channels: odd and few, or so many that a row takes two programs or one of more warps."""
    return draw.choice([1, 2, draw.randint(3, 70), draw.randint(1020, 1100)])


def numbers(draw: Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)))


def apart(draw: Random, x: Tensor) -> Tensor:
    """The same numbers, of rows that lie apart, and of channels that are neighbours or not."""
    rows, step = x.flatten(1), draw.choice([1, 1, 2])
    gap = draw.randint(1, 5)
    memory = torch.full((len(rows), rows.shape[1] * step + gap), float("nan"))
    places = memory[:, : rows.shape[1] * step : step]
    places.copy_(rows)
    return places.view(x.shape)


def assert_near(found: Tensor, wanted: Tensor, near: float = 2e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("groups", [None, 3])
def test_a_norm_is_what_is_written_out(
    groups: int | None, by_group: bool, added: bool, seed: int
) -> None:
    draw = Random(seed)
    rows, size = draw.randint(0, 6), size_of(draw)
    inner = (size,) if groups is None else (groups, size)
    x = apart(draw, numbers(draw, rows, *inner) * draw.choice([1.0, 1e-3, 0.0]))
    residual = apart(draw, numbers(draw, rows, *inner)) if added else None
    weight = numbers(draw, *inner) if by_group else numbers(draw, size)
    found = OPS.norm(weight, EPS, torch.float32)(x, residual)
    assert_near(found, norm(x, weight, EPS, torch.float32, residual))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("gating", Gating)
def test_a_norm_with_a_gate_is_what_is_written_out(
    gating: Gating, by_group: bool, seed: int
) -> None:
    draw = Random(seed)
    rows, size, groups = draw.randint(0, 6), size_of(draw), draw.randint(1, 3)
    y = numbers(draw, rows, groups, size)
    gate = apart(draw, 3.0 * numbers(draw, rows, groups * size))
    weight: Tensor | None = None
    if gating is not Gating.GATE_ONLY:
        weight = numbers(draw, groups, size) if by_group else numbers(draw, size)
    wanted = gated_norm(y.clone(), gate, weight, EPS, gating=gating)
    found = OPS.gated_norm(weight, EPS, gating=gating)(y, gate)
    assert_near(found, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", Activation)
def test_an_activation_is_what_is_written_out(kind: Activation, gated: bool, seed: int) -> None:
    draw = Random(seed)
    rows, size = draw.randint(0, 6), size_of(draw)
    x = apart(draw, 3.0 * numbers(draw, rows, 2 * size if gated else size))
    found = OPS.activation(kind, gated=gated)(x)
    assert_near(found, activation(x, kind, gated=gated))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_gate_is_what_is_written_out(sigmoid: bool, by_row: bool, added: bool, seed: int) -> None:
    draw = Random(seed)
    rows, size = draw.randint(0, 6), size_of(draw)
    x, by = (apart(draw, numbers(draw, rows, width)) for width in (size, 1 if by_row else size))
    residual = apart(draw, numbers(draw, rows, size)) if added else None
    found = OPS.gate(x, by, residual, sigmoid=sigmoid)
    assert_near(found, naive_gate.gate(x, by, residual, sigmoid=sigmoid))


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (Activation.SILU, F.silu),
        (Activation.GELU_TANH, gelu),
        (Activation.RELU2, squared_relu),
        (None, torch.sigmoid),
    ],
)
def test_functions_over_their_whole_range(
    kind: Activation | None, function: Callable[[Tensor], Tensor]
) -> None:
    """Of bfloat16's numbers one in 43: both infinities, denormals, and NaN, which stays NaN."""
    some = torch.arange(-(2**15), 2**15, 43, dtype=torch.int16).view(torch.bfloat16).float()
    x = torch.cat([some, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])]).view(1, -1)
    if kind is None:
        found = OPS.gate(torch.ones_like(x), x)
    else:
        found = OPS.activation(kind, gated=False)(x)
    wanted = function(x.double()).float()
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_heads_are_rotated_where_they_lie(seed: int) -> None:
    """Nothing else in their rows changes: other channels of a head, and what lies between rows."""
    draw = Random(seed)
    rows, heads, half, rest = (draw.randint(low, 5 * low + 8) for low in (0, 1, 1, 0))
    size = 2 * half + rest
    ours = numbers(draw, rows, heads * size + 7)
    truth = ours.clone()
    rotary = numbers(draw, rows, 2, 2 * half).transpose(0, 1).unsqueeze(2)
    for memory, rotate_ in ((ours, OPS.rotate_), (truth, naive_rotary.rotate_)):
        rotate_(memory[:, 2 : 2 + heads * size].view(rows, heads, size), rotary)
    assert_near(ours, truth)


def test_many_heads_take_more_than_one_program() -> None:
    draw = Random(1)
    ours, rotary = numbers(draw, 2, 37, 80), numbers(draw, 2, 2, 1, 80)
    truth = ours.clone()
    OPS.rotate_(ours, rotary)
    naive_rotary.rotate_(truth, rotary)
    assert_near(ours, truth)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_looked_up(seed: int) -> None:
    draw = Random(seed)
    size = size_of(draw)
    table = numbers(draw, 11, *draw.choice([(size,), (2, size)]))
    rows = torch.tensor([draw.randrange(11) for _ in range(draw.randint(1, 9))])
    scale = draw.choice([1.0, 12.0, 0.3])
    found = OPS.lookup(table, rows, torch.float32, scale=scale)
    assert_near(found, naive_lookup.lookup(table, rows, torch.float32, scale=scale))


def test_a_norm_depends_on_its_run_only() -> None:
    """Bit by bit: runs that share a program have sums of their own."""
    draw = Random(2)
    x, weight = numbers(draw, 7, 3, 45), numbers(draw, 45)
    together = OPS.norm(weight, EPS, torch.float32)(x)
    for row in range(7):
        assert torch.equal(OPS.norm(weight, EPS, torch.float32)(x[row : row + 1])[0], together[row])
