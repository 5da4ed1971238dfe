"""Greedy tokens of a pair of nodes are those of `transformers`, wherever float32 can tell."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from torch import Tensor

from tests.support.nodes.cluster import CONTEXT, Cluster, Generation
from tests.support.nodes.oracle import reference_logits
from tests.support.nodes.pairs import FAMILIES, GREEDY, MARGIN, hand_over, hand_over_all, prompt_of

LENGTHS = (1, 16, 65, 130, 200, CONTEXT - 50)
SAMPLING = msgspec.structs.replace(GREEDY, max_tokens=40)


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_equal_transformers(
    shared: Cluster,
    checkpoints: dict[str, Path],
    record_property: Callable[[str, object], None],
    family: str,
) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[family]).eval()
    p, d = await shared.pair(checkpoints[family])
    prompts = [prompt_of(length, salt=length) for length in LENGTHS]
    answers = [await hand_over(p, d, prompt, SAMPLING) for prompt in prompts]
    answers += await hand_over_all(p, d, prompts, SAMPLING)
    near_ties = [
        judge(log_softmax(reference, prompt, answer.token_ids), answer)
        for prompt, answer in zip([*prompts, *prompts], answers, strict=True)
    ]
    record_property("near-ties", f"{sum(near_ties)} of {len(answers) * SAMPLING.max_tokens} tokens")


def log_softmax(
    reference: transformers.PreTrainedModel, prompt: tuple[int, ...], chosen: list[int]
) -> Tensor:
    """The reference's log-probabilities [tokens, vocab], each row after our own prefix."""
    logits = reference_logits(reference, [*prompt, *chosen[:-1]])
    return torch.log_softmax(logits[len(prompt) - 1 :], dim=-1)


def judge(expected: Tensor, answer: Generation) -> int:
    """Near-ties of the reference; asserts that every choice is its best one, or as good."""
    chosen = torch.tensor(answer.token_ids).unsqueeze(1)
    top = expected.topk(2).values
    theirs = expected.gather(1, chosen).squeeze(1)
    assert float((top[:, 0] - theirs).max()) <= MARGIN
    ours = torch.tensor([entry.logprob for entry in answer.logprobs])
    assert float((ours - theirs).abs().max()) <= MARGIN
    return int((top[:, 0] - top[:, 1] <= MARGIN).sum())
