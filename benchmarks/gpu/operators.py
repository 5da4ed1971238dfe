"""The phase `operators`: the device's table of operators beside the naive ones on the CPU.

Inputs are random, and in bfloat16 both sides get the same rounded ones. An error is a share of the
largest value. Without a GPU the kernels run in Triton's interpreter, in float32 and small shapes.
"""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import torch

from benchmarks.gpu.operator_attention import Heads, attention
from benchmarks.gpu.operator_batches import OUTPUTS, STATES, Trial
from benchmarks.gpu.operator_states import convolution, delta_rule, duality, selective_scan
from benchmarks.gpu.sheet import Setting, Sheet
from benchmarks.support import interpreter
from engine.forward import ForwardBatch, SequenceLens
from engine.layers.rotary import Rotary
from engine.model_configs.feed_forward import Activation
from engine.model_configs.recurrent import Gating
from engine.model_configs.rope import RopeConfig
from engine.ops.activation import naive as activations
from engine.ops.backend import cuda_ops, ops_for, torch_ops
from engine.ops.experts import naive as experts
from engine.ops.gate import naive as gates
from engine.ops.gated_norm import naive as gated_norms
from engine.ops.lookup import naive as lookups
from engine.ops.norm import naive as norms
from engine.step import SamplingInput
from engine.types import SamplingParams
from engine.worker import device_sampler
from engine.worker.sampler import sample

# Of bfloat16 inputs and float32 states: what is accepted, and the goal.
ACCEPTED = {OUTPUTS: (1e-2, 3e-3), STATES: (5e-3, 3e-3)}


def run(sheet: Sheet, setting: Setting) -> None:
    """Each family of each column; of a GPU in bfloat16 too, whose errors are judged as a whole."""
    torch.manual_seed(0)
    device = torch.device(setting.device)
    for trial in _trials(sheet, setting, device):
        for name, case in _cases(trial).items():
            with sheet.attempt(f"{trial.name}: {name}"):
                case(trial)
        if setting.on_gpu and trial.dtype == torch.bfloat16:
            for kind, (bound, goal) in ACCEPTED.items():
                worst = trial.largest[kind]
                sheet.accept(f"bfloat16, error of {kind}", worst, "", accept=bound, goal=goal)
    with sheet.attempt("sampling"):
        _sampling(sheet, device)


def _trials(sheet: Sheet, setting: Setting, device: torch.device) -> Iterator[Trial]:
    both = torch.float32, torch.bfloat16
    for dtype in both:
        yield Trial(sheet, ops_for(device, dtype, kernels="auto"), device, dtype)
    if not setting.on_gpu:
        interpreter.patch()
        yield Trial(sheet, cuda_ops(), device, torch.float32, small=True)


def _cases(trial: Trial) -> dict[str, Callable[[Trial], None]]:
    heads = Heads(4, 2, 32) if trial.small else Heads(16, 4, 128)
    cases: dict[str, Callable[[Trial], None]] = {
        "paged attention": partial(attention, sizes=heads),
        "paged attention, a window": partial(attention, sizes=heads, window=40),
        "gated delta rule": partial(delta_rule, by_channel=False),
        "gated delta rule by channel": partial(delta_rule, by_channel=True),
        "selective scan": selective_scan,
        "ssd": duality,
        "causal conv1d": convolution,
        # Of few, some and many tokens for each expert: kernels have tiles of their own for them.
        "experts": partial(_experts, tokens=5 if trial.small else 16),
        "norms": _norms,
        "pointwise": _pointwise,
        "rotary": _rotary,
    }
    if trial.small:
        cases["paged attention, latents"] = partial(attention, sizes=Heads(3, 1, 40))
    if trial.device.type != "cpu":
        cases["paged attention, latents"] = partial(attention, sizes=Heads(32, 1, 576))
        for tokens in (262, 2_100):
            cases[f"experts, {tokens}"] = partial(_experts, tokens=tokens)
    return cases


def _experts(trial: Trial, *, tokens: int) -> None:
    count, top_k, width, inner = (8, 2, 40, 20) if trial.small else (32, 4, 256, 128)
    x = torch.randn(tokens, width).to(trial.dtype)
    # Of half of them, so that there are experts without a token.
    chosen = torch.rand(tokens, count // 2).argsort(dim=1)[:, :top_k].contiguous()
    shares = torch.rand(tokens, top_k)
    up = (torch.randn(count, 2 * inner, width) * width**-0.5).to(trial.dtype)
    down = (torch.randn(count, width, inner) * inner**-0.5).to(trial.dtype)
    kind, rows = Activation.SILU, (part.to(trial.device) for part in (x, chosen, shares))
    own = trial.ops.experts(up.to(trial.device), down.to(trial.device), activation=kind, gated=True)
    truth = experts.experts(x, chosen, shares, up, down, activation=kind, gated=True)
    trial.near(f"experts, {tokens} tokens", own(*rows), truth, limit=trial.limit)


def _norms(trial: Trial) -> None:
    """The truth is of float32 copies, so that it is not rounded."""
    rows, groups, dim, eps = 7, 3, 40 if trial.small else 128, 1e-6
    x, residual = torch.randn(2, rows, groups * dim).to(trial.dtype)
    there, added = x.to(trial.device), residual.to(trial.device)
    wide, weight = x.float(), torch.rand(groups * dim)
    found = trial.ops.norm(weight.to(trial.device), eps, trial.dtype)(there, added)
    truth = norms.norm(wide, weight, eps, torch.float32, residual.float())
    trial.near("norm", found, truth, limit=trial.limit)
    by_group = weight.view(groups, dim)
    found = trial.ops.norm(by_group.to(trial.device), eps, trial.dtype)(there.view(rows, -1, dim))
    truth = norms.norm(wide.view(rows, -1, dim), by_group, eps, torch.float32)
    trial.near("norm by group", found, truth, limit=trial.limit)
    for gating in Gating:
        own = None if gating is Gating.GATE_ONLY else weight[:dim]
        y = torch.randn(rows, groups * dim)
        moved = None if own is None else own.to(trial.device)
        truth = gated_norms.gated_norm(y.clone(), wide, own, eps, gating=gating)
        # An operator may overwrite y.
        found = trial.ops.gated_norm(moved, eps, gating=gating)(y.to(trial.device), there)
        trial.near(f"gated norm, {gating.value}", found, truth, limit=trial.limit)


def _pointwise(trial: Trial) -> None:
    size = 40 if trial.small else 2560
    x, other, residual = torch.randn(3, 9, size).to(trial.dtype)
    there = [part.to(trial.device) for part in (x, other, residual)]
    for kind in Activation:
        for gated in (True, False):
            found = trial.ops.activation(kind, gated=gated)(there[0])
            truth = activations.activation(x.float(), kind, gated=gated)
            case = f"activation {kind.value}{', gated' if gated else ''}"
            trial.near(case, found, truth, limit=trial.limit)
    for sigmoid, by in ((True, slice(0, 1)), (False, slice(None))):
        found = trial.ops.gate(there[0], there[1][:, by], there[2], sigmoid=sigmoid)
        wide = x.float(), other[:, by].float(), residual.float()
        trial.near("gate", found, gates.gate(*wide, sigmoid=sigmoid), limit=trial.limit)
    rows = torch.tensor([3, 0, 3])
    found = trial.ops.lookup(there[0], rows.to(trial.device), trial.dtype, scale=2.0)
    truth = lookups.lookup(x, rows, torch.float32, scale=2.0)
    trial.near("lookup", found, truth, limit=trial.limit)
    matrix = torch.randn(24 if trial.small else 1024, size).to(trial.dtype)
    found = trial.ops.linear(matrix.to(trial.device))(there[0])
    trial.near("product", found, x.double() @ matrix.double().t(), limit=trial.limit)


def _rotary(trial: Trial) -> None:
    rope = RopeConfig(theta=1e6, rotary_dim=64)
    lens = SequenceLens(2, [1, 1], [5000, 17])
    x = torch.randn(2, 4, 256).to(trial.dtype)
    turned = []
    here = torch.device("cpu"), torch.float32, torch_ops()
    for place, kind, own in ((trial.device, trial.dtype, trial.ops), here):
        positions = torch.tensor([5000, 17], device=place)
        batch = ForwardBatch(positions, positions, lens, (), positions)
        heads = x.to(place, kind, copy=True)
        own.rotate_(heads, Rotary(rope, kind, place, ops=own).select(batch))
        turned.append(heads)
    # Tables of sines may have the model's dtype, on both sides of a turn.
    trial.near("rotary, position 5,000", turned[0], turned[1], limit=5 * trial.limit)


def _sampling(sheet: Sheet, device: torch.device) -> None:
    """The same logits, so the same tokens: row by row on the CPU, all rows on the device."""
    logits = 4 * torch.randn(64, 32_000)
    kinds = {
        "greedy": SamplingInput(SamplingParams(temperature=0.0, logprobs=3), 0),
        "top-p": SamplingInput(SamplingParams(temperature=0.9, top_p=0.9, seed=3), 0),
        "top-k and min-p": SamplingInput(
            SamplingParams(temperature=1.2, top_k=50, min_p=0.02, seed=4), 0
        ),
        "bias": SamplingInput(
            SamplingParams(temperature=0.8, logit_bias={5: 20.0, 9: -50.0}, seed=5), 0
        ),
        "penalties, some tokens ruled out": SamplingInput(
            SamplingParams(
                temperature=0.8,
                repetition_penalty=1.3,
                frequency_penalty=0.4,
                presence_penalty=0.2,
                seed=6,
            ),
            0,
            forbidden=frozenset(range(0, 32_000, 5)),
            seen=frozenset(range(0, 32_000, 2)),
            counts={token: 1 + token % 3 for token in range(0, 32_000, 4)},
            allowed=b"\x7b" * 3_000,
        ),
    }
    for name, kind in kinds.items():
        inputs = {str(row): msgspec.structs.replace(kind, position=row) for row in range(64)}
        here = sample(logits, inputs).sampled
        there = device_sampler.launch(logits.to(device), inputs).result().sampled
        same = sum(here[row].token_id == there[row].token_id for row in inputs)
        sheet.tell(f"sampling, {name}", f"{same} of 64 tokens", "right" if same == 64 else "wrong")
