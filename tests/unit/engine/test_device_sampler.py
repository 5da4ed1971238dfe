"""All rows at once on a device: tokens, log-probabilities and errors are those of one by one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isclose
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray
from structlog.testing import capture_logs
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.step import (
    NO_TOKENS,
    ModelRunnerOutput,
    PromptTargets,
    SampledToken,
    SamplingInput,
    ScheduledRequest,
)
from engine.types import PromptLogprobs, SamplingParams
from engine.worker import device_sampler
from engine.worker.device_sampler import best, launch
from engine.worker.packed_copies import CopyToHost, to_device
from engine.worker.sampler import prompt_logprobs, sample
from tests.support.host_access import no_host_access

VOCAB = 37
Inputs = Mapping[str, SamplingInput]

ids = st.integers(0, VOCAB - 1)
some_ids = st.frozensets(ids, max_size=VOCAB)
# None, few, all but few: and masks that are longer or shorter than the vocabulary.
masks = st.one_of(
    st.just(b""),
    st.binary(min_size=1, max_size=7),
    st.integers(0, 40).map(lambda bit: (1 << bit).to_bytes(6, "little")),
)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Errors are compared, not read: a traceback takes seconds to print."""
    with capture_logs():
        yield


def or_none(usual: float, others: st.SearchStrategy[float]) -> st.SearchStrategy[float]:
    return st.one_of(st.just(usual), others)


params = st.builds(
    SamplingParams,
    temperature=or_none(0.0, st.sampled_from([0.01, 0.7, 1.0, 30.0])),
    top_p=or_none(1.0, st.sampled_from([1e-9, 0.3, 0.95])),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, VOCAB - 1, VOCAB, 500]),
    min_p=or_none(0.0, st.sampled_from([0.05, 0.9, 1.0])),
    presence_penalty=or_none(0.0, st.floats(-2, 2)),
    frequency_penalty=or_none(0.0, st.floats(-2, 2)),
    repetition_penalty=or_none(1.0, st.floats(0.1, 10)),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, None, 0, 1, 4, 20]),
    logit_bias=st.one_of(st.just({}), st.dictionaries(ids, st.floats(-100, 100), max_size=9)),
)


@st.composite
def requests(draw: st.DrawFn) -> SamplingInput:
    own = draw(params)
    is_seen = own.repetition_penalty != 1.0
    is_counted = own.presence_penalty != 0.0 or own.frequency_penalty != 0.0
    every = frozenset(range(VOCAB + 3))
    forbidden = st.one_of(st.sampled_from([NO_TOKENS, every]), some_ids)
    return SamplingInput(
        own,
        draw(st.integers(0, 99)),
        forbidden=draw(forbidden),
        seen=draw(some_ids) if is_seen else frozenset(),
        counts=draw(st.dictionaries(ids, st.integers(1, 9), max_size=9)) if is_counted else {},
        allowed=draw(masks),
    )


@st.composite
def logits_of(draw: st.DrawFn, rows: int) -> Tensor:
    """Few levels in some rows, so with many ties; some rows hold NaN, infinity, or no token."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = 3 * torch.randn((rows, VOCAB), generator=generator)
    for row in logits:
        match draw(st.sampled_from(["plain", "plain", "ties", "ties", "holes", "broken"])):
            case "ties":
                row.round_()
            case "holes":
                row[torch.randperm(VOCAB, generator=generator)[: draw(ids)]] = -torch.inf
            case "broken":
                broken = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
                row[draw(ids) :: draw(st.sampled_from([1, 50]))] = broken
            case _:
                pass
    return logits


def assert_same(got: ModelRunnerOutput, expected: ModelRunnerOutput, logits: Tensor) -> None:
    told = {name: (type(error), str(error)) for name, error in got.failed.items()}
    assert told == {name: (type(error), str(error)) for name, error in expected.failed.items()}
    assert got.sampled.keys() == expected.sampled.keys()
    for name, token in expected.sampled.items():
        assert_same_token(got.sampled[name], token, logits[int(name)].log_softmax(-1))


def assert_same_token(got: SampledToken, expected: SampledToken, logprobs: Tensor) -> None:
    """Of equal log-probabilities torch says in no order which come first."""
    assert got.token_id == expected.token_id
    if expected.logprob is None:
        assert got.logprob is None
        return
    assert got.logprob is not None
    assert got.logprob.token_id == expected.token_id
    pairs = [(got.logprob.logprob, expected.logprob.logprob)]
    for (own, value), (_, other) in zip(got.logprob.top, expected.logprob.top, strict=True):
        pairs += [(value, other), (value, float(logprobs[own]))]
    assert all(isclose(one, other, rel_tol=1e-6, abs_tol=1e-6) for one, other in pairs)
    assert len({own for own, _ in got.logprob.top}) == len(got.logprob.top)


def launched(logits: Tensor, inputs: Inputs) -> ModelRunnerOutput:
    with torch.inference_mode(), no_host_access():
        sampling = launch(logits, inputs)
    output = sampling.result()
    expected = [output.sampled[one].token_id if one in output.sampled else -1 for one in inputs]
    assert sampling.tokens.tolist() == expected
    return output


@settings(max_examples=25)
@given(inputs=st.lists(requests(), min_size=1, max_size=6), data=st.data())
def test_same_as_one_by_one(inputs: list[SamplingInput], data: st.DataObject) -> None:
    logits = data.draw(logits_of(len(inputs)))
    named = {str(row): item for row, item in enumerate(inputs)}
    assert_same(launched(logits, named), sample(logits, named), logits)


def close_requests(rows: int) -> dict[str, SamplingInput]:
    """Most parameters at once: scores are so close that each of them decides in some row."""
    draw = Random(7)

    def some(share: float) -> frozenset[int]:
        return frozenset(token for token in range(VOCAB) if draw.random() < share)

    named = {}
    for row in range(rows):
        own = SamplingParams(
            temperature=draw.choice([0.0, 0.02, 0.5]),
            top_k=draw.choice([0, 2, 3, 9]),
            top_p=draw.choice([1.0, 0.5]),
            min_p=draw.choice([0.0, 0.3]),
            presence_penalty=draw.choice([0.0, -0.1, 0.1]),
            frequency_penalty=draw.choice([0.0, -0.05, 0.05]),
            repetition_penalty=draw.choice([1.0, 0.3, 3.0]),
            logit_bias=dict.fromkeys(some(0.3), draw.choice([0.2, -0.2])),
            seed=row,
        )
        seen, counts = some(0.5), dict.fromkeys(some(0.4), draw.choice([1, 2]))
        # One token, which may be forbidden, or none that exists.
        lone = draw.randrange(40)
        allowed = draw.choice([b"", draw.randbytes(5), (1 << lone).to_bytes(5, "little")])
        forbidden = some(0.1) | draw.choice([NO_TOKENS, {lone}, frozenset(range(VOCAB))])
        named[str(row)] = SamplingInput(own, row, forbidden, seen, counts, allowed)
    return named


@pytest.mark.parametrize("number", [None, 0.0, 0.5, 1.0])
def test_same_where_little_decides(monkeypatch: pytest.MonkeyPatch, number: float | None) -> None:
    """Numbers at the edge of a token: 1 is none, but what rounding may make of one below it."""
    if number is not None:
        for module in ("device_sampler", "sampler"):
            monkeypatch.setattr(f"engine.worker.{module}.uniform", lambda *_: number)
    inputs = close_requests(150)
    if number is not None:
        # Ties, so that edges are exact.
        inputs = {
            name: structs.replace(item, seen=frozenset(), counts={}, allowed=b"")
            for name, item in inputs.items()
        }
    logits = 0.1 * torch.randn((150, VOCAB), generator=torch.Generator().manual_seed(8))
    logits = logits if number is None else logits.mul_(8).round_()
    assert_same(launched(logits, inputs), sample(logits, inputs), logits)


def test_same_for_many_rows_and_long_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several slices, and with lists that are too long to be selected."""
    vocab = 1500
    monkeypatch.setattr(device_sampler, "MAX_SLICE_BYTES", 8 * vocab * 7)
    kinds = [
        SamplingParams(temperature=0.9, top_k=1200, seed=1),
        SamplingParams(temperature=0.9, top_k=300, top_p=0.9, logprobs=3, seed=2),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0, logit_bias={3: 50.0}),
        SamplingParams(temperature=1.5, min_p=0.01, logprobs=0, seed=3),
    ]
    logits = torch.randn((40, vocab), generator=torch.Generator().manual_seed(1))
    logits[::2] = logits[::2].mul_(4).round_()
    inputs = {str(row): SamplingInput(kinds[row % 5], row) for row in range(40)}
    assert_same(launched(logits, inputs), sample(logits, inputs), logits)


@settings(max_examples=30)
@given(
    levels=st.sampled_from([1, 2, 5, 1000]),
    top_k=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_selected_as_a_stable_sort_would(levels: int, top_k: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (len(top_k), 40), generator=generator).double()
    scores[scores == 1] = -torch.inf
    values, tokens = best(scores, torch.tensor(top_k), max(top_k))
    ordered, places = scores.sort(dim=-1, descending=True, stable=True)
    for row, count in enumerate(top_k):
        assert torch.equal(values[row, :count], ordered[row, :count])
        assert torch.equal(tokens[row, :count], places[row, :count])


def test_values_of_one_request_end_it_alone() -> None:
    """An id outside of the logits would stop a device for good: it does not get there."""
    kinds = {
        "0": SamplingInput(SamplingParams(temperature=0.0), 0),
        "1": SamplingInput(SamplingParams(temperature=0.0, logit_bias={VOCAB: 1.0}), 0),
        "2": SamplingInput(SamplingParams(repetition_penalty=2.0), 0, seen={VOCAB + 7}),
        "3": SamplingInput(SamplingParams(seed=4), 0),
        # No token at all, of broken logits too; and one that has no score.
        "4": SamplingInput(SamplingParams(), 0, allowed=b"\x00"),
        "5": SamplingInput(SamplingParams(), 0, allowed=b"\x01"),
    }
    logits = torch.randn((6, VOCAB), generator=torch.Generator().manual_seed(2))
    logits[4, 3] = torch.nan
    logits[5, 0] = -torch.inf
    output = launched(logits, kinds)
    assert output.failed.keys() == {"1", "2", "4", "5"}
    assert_same(output, sample(logits, kinds), logits)


EVERYTHING = SamplingInput(
    SamplingParams(
        temperature=0.8,
        top_k=7,
        top_p=0.9,
        logprobs=3,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={1: 2.0},
    ),
    5,
    forbidden=frozenset({1, 4}),
    seen=frozenset({3, 5}),
    counts={3: 2},
)


@pytest.mark.parametrize(
    "inputs",
    [
        {"a": SamplingInput(SamplingParams(temperature=0.0), 0)},
        {
            "a": EVERYTHING,
            "b": SamplingInput(SamplingParams(min_p=0.1), 0, allowed=b"\x5f\x03"),
            "c": SamplingInput(SamplingParams(temperature=0.0, logit_bias={2: 1.0}), 0),
        },
    ],
    ids=["greedy", "everything"],
)
def test_all_is_launched_on_the_device(inputs: Inputs) -> None:
    """A meta tensor has no numbers, and nothing on a CPU can be computed with it."""
    logits = torch.empty((len(inputs), VOCAB), device="meta")
    with torch.inference_mode():
        tokens = launch(logits, inputs).tokens
    assert (tokens.device.type, tokens.dtype, tokens.shape) == ("meta", torch.int64, (len(inputs),))


class Launches(TorchFunctionMode):
    """Counts functions that compute on a device: not views, nor what fills the host's buffer."""

    VIEWS = frozenset(
        {"view", "reshape", "flatten", "unsqueeze", "squeeze", "split", "__get__", "__getitem__"}
        | {"empty", "new_empty", "from_numpy", "copy_", "to", "size", "dim", "__len__", "nelement"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func.__name__ not in self.VIEWS:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def count(inputs: Sequence[SamplingInput]) -> int:
    logits = torch.randn((len(inputs), VOCAB), generator=torch.Generator().manual_seed(3))
    with Launches() as launches:
        launch(logits, {str(row): item for row, item in enumerate(inputs)})
    return len(launches.names)


def test_launches_do_not_grow_with_the_rows() -> None:
    greedy = SamplingInput(SamplingParams(temperature=0.0), 0)
    # The highest logit, the report, and three for rows that fail.
    assert count([greedy]) == count([greedy] * 50) == 5
    assert count([EVERYTHING] * 2) == count([EVERYTHING] * 50) < 90


def test_packed_copies_keep_types_and_shapes() -> None:
    arrays: list[NDArray[Any]] = [
        np.arange(3, dtype=np.uint8),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.zeros((0, 4), np.int64),
        np.array([0.5, -np.inf]),
    ]
    sent = to_device(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, sent, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)
    back = CopyToHost([sent[1].T, sent[2], sent[3].float(), sent[0]]).arrays()
    assert [one.dtype.name for one in back] == ["int64", "int64", "float32", "uint8"]
    assert np.array_equal(back[0], arrays[1].T)
    assert np.array_equal(back[3], arrays[0])


class TestPromptLogprobs:
    """One copy for each request's chunk, in slices or at once."""

    def asked(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> dict[str, PromptLogprobs]:
        monkeypatch.setattr("engine.worker.sampler.MAX_SLICE_BYTES", 4 * VOCAB * rows)
        hidden = torch.randn((12, 4), generator=torch.Generator().manual_seed(5))
        matrix = torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(6))
        ordered = [
            ScheduledRequest("a", [1] * 3, 0, ()),
            ScheduledRequest("b", [1] * 9, 0, (), targets=PromptTargets(1, [7, 0, 36, 5, 5], 3)),
        ]
        return prompt_logprobs(hidden, ordered, lambda states: states @ matrix)

    def test_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hidden = torch.randn((12, 4), generator=torch.Generator().manual_seed(5))
        matrix = torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(6))
        logprobs = (hidden[4:9] @ matrix).log_softmax(-1)
        for rows in (1, 2, 100):
            found = self.asked(monkeypatch, rows)
            assert found.keys() == {"b"}
            assert found["b"].num_top == 3
            for row, (token, rank) in enumerate(found["b"].rows()):
                assert token.token_id == [7, 0, 36, 5, 5][row]
                own = float(logprobs[row, token.token_id])
                assert token.logprob == pytest.approx(own)
                assert rank == int((logprobs[row] >= own).sum())
                values, tokens = logprobs[row].topk(3)
                assert [one for one, _ in token.top] == tokens.tolist()
                assert [value for _, value in token.top] == pytest.approx(values.tolist())

    def test_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        copies = []
        read = CopyToHost.arrays

        def counted(self: CopyToHost) -> list[NDArray[Any]]:
            copies.append(self)
            return read(self)

        monkeypatch.setattr(CopyToHost, "arrays", counted)
        self.asked(monkeypatch, 1)
        assert len(copies) == 1
