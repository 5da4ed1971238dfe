"""Tokens that a step may and may not choose: the same as by definition, at a bounded cost."""

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.bad_words import BadWordMatcher
from engine.errors import InvalidRequestError
from engine.kv_cache.prefix import PrefixHasher
from engine.prompt_checks import check_bad_words
from engine.request import Request
from engine.step import SamplingInput
from engine.types import BadWord, GenerateRequest, SamplingParams
from engine.worker.sampler import sample

TOKENS = st.integers(0, 3)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=6).map(tuple), max_size=20)


def by_definition(
    words: Sequence[tuple[int, ...]], token_ids: list[int], start: int
) -> frozenset[int]:
    """Last tokens of the words whose other tokens end the output."""
    return frozenset(
        word[-1]
        for word in words
        if (first := len(token_ids) - len(word) + 1) >= start
        and tuple(token_ids[first:]) == word[:-1]
    )


@given(words=WORDS, prompt=st.lists(TOKENS, max_size=4), output=st.lists(TOKENS, max_size=30))
def test_bad_words_are_those_of_the_definition(
    words: list[tuple[int, ...]], prompt: list[int], output: list[int]
) -> None:
    """Few tokens, so that words begin in each other; several tokens may come between two calls."""
    matcher = BadWordMatcher(tuple(map(BadWord, words)), len(prompt))
    token_ids = list(prompt)
    for index, token in enumerate(output):
        token_ids.append(token)
        if index % 3 != 1:
            assert matcher.forbidden(token_ids) == by_definition(words, token_ids, len(prompt))


class CountedToken(int):
    """A token that notes how often one is looked up."""

    num_lookups = 0

    def __hash__(self) -> int:
        CountedToken.num_lookups += 1
        return int(self)


@pytest.mark.parametrize("num_words", [10, 5000])
def test_a_step_costs_the_same_whatever_the_number_of_bad_words(num_words: int) -> None:
    """Also where all of them begin alike, and as the output does."""
    ends = range(1, num_words + 1)
    words = [(0,) * (end % 16) + (end, end) for end in ends]
    matcher = BadWordMatcher(tuple(map(BadWord, words)), 0)
    output = [CountedToken(it) for it in [*[0] * 500, *random.Random(1).choices(range(20), k=500)]]
    CountedToken.num_lookups = 0
    for length in range(len(output)):
        matcher.forbidden(output[:length])
    # Each token goes one node down; each step up was a step down before.
    assert CountedToken.num_lookups <= 4 * len(output)


def test_the_tokens_of_all_bad_words_are_bounded() -> None:
    words = [BadWord((1,) * 1024)] * 16
    check_bad_words(words, 2)
    with pytest.raises(InvalidRequestError, match=r"16385 tokens.*at most 16384"):
        check_bad_words([*words, BadWord((1,))], 2)
    with pytest.raises(InvalidRequestError, match="token id 1 is outside"):
        check_bad_words(words, 1)


def request_with(prompt: tuple[int, ...], **sampling: object) -> Request:
    params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    origin = GenerateRequest(request_id="r", prompt_token_ids=prompt, sampling=params)
    return Request.from_generate(
        origin, PrefixHasher(16), max_model_len=1000, eos_token_ids=frozenset()
    )


def test_seen_tokens_grow_with_the_request() -> None:
    request = request_with((5, 5, 2), repetition_penalty=2.0)
    assert request.seen_tokens() == {2, 5}
    for token in (7, 2, 9):
        request.append(token, None)
    assert request.seen_tokens() == {2, 5, 7, 9}


@pytest.mark.parametrize("ids", [(0,), (3, 8, 8), (15, 2), tuple(range(16))])
@pytest.mark.parametrize("forbidden", [frozenset[int](), frozenset({3, 99}), frozenset({0})])
def test_only_allowed_tokens_are_drawn(ids: tuple[int, ...], forbidden: frozenset[int]) -> None:
    """Forbidden tokens may come where no others are allowed."""
    request = request_with((1,), allowed_token_ids=ids)
    mask = request.allowed_tokens()
    assert np.flatnonzero(
        np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    ).tolist() == (sorted(set(ids)))
    found: Counter[int] = Counter()
    for seed in range(200):
        item = SamplingInput(SamplingParams(seed=seed), 1, forbidden=forbidden, allowed=mask)
        found[sample(torch.zeros(1, 16), {"r": item}).sampled["r"].token_id] += 1
    assert set(found) == (set(ids) - forbidden or set(ids))
