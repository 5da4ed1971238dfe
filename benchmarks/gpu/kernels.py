"""The phase `kernels`: the gated delta rule of fla-core beside ours, in Qwen3.5's shapes."""

import importlib
from functools import partial

import torch

from benchmarks.gpu.sheet import Setting, Sheet
from engine.ops.gated_delta_rule import fast, naive

KEYS, VALUES, DIM = 16, 32, 128
TRUE_TOKENS, TOKENS = 200, 2_048


def run(sheet: Sheet, setting: Setting) -> None:
    """Errors of a short segment against the naive form in float64, and times of a long one."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    torch.manual_seed(0)

    def inputs(tokens: int) -> list[torch.Tensor]:
        q, k = torch.randn(2, tokens, KEYS, DIM)
        v = torch.randn(tokens, VALUES, DIM)
        g, beta = -torch.rand(tokens, VALUES), torch.rand(tokens, VALUES)
        return [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta, torch.randn(1, VALUES, DIM, DIM)]

    def theirs(q: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v, g, beta, state = rest
        o, final = rule(
            *(part.unsqueeze(0) for part in (q, k, v, g, beta)),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.tensor([0, len(q)], device=q.device),
        )
        return o[0], final

    def ours(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, beta, state = parts
        lens = [len(q)]
        return fast.chunk(q, k, v, g, beta=beta, query_lens=lens, initial=state)[:2]

    here = inputs(TRUE_TOKENS)
    q, k, v, g, beta, state = here
    y, final, _ = naive.chunk(
        q, k, v, g, beta=beta, query_lens=[TRUE_TOKENS], initial=state.double()
    )
    there, long = ([part.to(setting.device) for part in these] for these in (here, inputs(TOKENS)))
    for name, work in (("fla-core", theirs), ("ours", ours)):
        with sheet.attempt(name):
            o, found = work(*there)
            sheet.near(f"{name}, bfloat16, output", o, y, limit=1e-2)
            sheet.near(f"{name}, bfloat16, state", found, final, limit=5e-3)
            with torch.inference_mode():
                taken = setting.seconds(partial(work, *long))
            sheet.tell(f"{name}, {TOKENS:,} tokens, one layer", f"{taken * 1e3:.2f} ms")
