"""The common part of each family's parity tests: a reference, our model of its folder, the cases.

A test file inherits `ParityTests` and names its `CASES`.

Tolerance: eight times the distance of the reference from itself when it takes tokens one by one
instead of in one go (its chunked against its recurrent form), because that is what float32 rounding
does to these logits. It is the largest of the first 100 tokens; where a later token's own is larger
(of one it was six times as large as of any before), that one.
"""

import copy
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from benchmarks.support.small_models import widen
from engine.compute_config import ComputeConfig
from engine.model_configs.model_config import ModelConfig
from engine.models.loader import CausalLM, load_model
from tests.support.nodes.oracle import (
    Runner,
    first_wrong_choice,
    load,
    reference_logits,
    rounding_errors,
)
from tests.tiers import everyday

CPU = torch.device("cpu")
VOCAB = 97
LENGTH = 300
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 5e4}


@dataclass(slots=True, frozen=True)
class Case:
    """A random model of a family, and perhaps what to change in the saved folder.

    `kind`: its class where that is not the one that `AutoModelForCausalLM` takes.
    `seed` and `embed` (see `widen`) are chosen so that greedy text wanders instead of looping.
    """

    config: PretrainedConfig
    edit: Callable[[Path], None] | None = None
    kind: type[PreTrainedModel] | None = None
    seed: int = 7
    embed: float = 0.1

    def build(self) -> PreTrainedModel:
        """With weights drawn anew; `config` stays as it is."""
        make = AutoModelForCausalLM.from_config if self.kind is None else self.kind
        return widen(make(copy.deepcopy(self.config)), self.seed, embed=self.embed)


@dataclass(slots=True)
class Pair:
    """A reference and our model of the same folder, and what the reference says of a sequence."""

    folder: Path
    reference: PreTrainedModel
    config: ModelConfig
    model: CausalLM
    tokens: list[int]
    logits: Tensor
    tolerance: float
    bounds: Tensor
    """Of each row: `tolerance`, or more where the reference itself wavers."""

    def check(self, got: Tensor, start: int = 0) -> None:
        rows = slice(start, start + len(got))
        distances = (got - self.logits[rows]).abs().amax(dim=1)
        assert (distances < self.bounds[rows]).all()


class ParityTests:
    """Whole, chunked and mixed work gives the reference's logits and greedy tokens."""

    CASES: ClassVar[Mapping[str, Case]]
    LONG: ClassVar[Container[str]] = ()
    """Names of cases whose settings are met in others, one by one: only in `make test-long`."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every test of the class is run on the pair of each case."""
        if "pair" in metafunc.fixturenames:
            daily = [name for name in self.CASES if name not in self.LONG]
            cases = everyday(self.CASES, daily)
            metafunc.parametrize("pair", cases, indirect=True, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def pair(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Pair]:
        """The reference as it reads the saved folder, and our model; one thread meanwhile."""
        case, folder = cls.CASES[request.param], tmp_path_factory.mktemp("model")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        model = case.build()
        model.save_pretrained(folder)
        reference = type(model).from_pretrained(folder).eval()
        if case.edit is not None:
            case.edit(folder)
        config, ours = load(folder)
        draw = torch.Generator().manual_seed(1)
        tokens = torch.randint(VOCAB, (LENGTH,), generator=draw).tolist()
        errors = 8 * rounding_errors(reference, tokens)
        tolerance = float(errors[:100].max())
        logits = reference_logits(reference, tokens)
        bounds = errors.clamp_min(tolerance)
        yield Pair(folder, reference, config, ours, tokens, logits, tolerance, bounds)
        torch.set_num_threads(threads)

    def test_the_tolerance_means_something(self, pair: Pair) -> None:
        """Rounding differs between processors (2e-4 was seen); a wrong op costs percents."""
        assert 0 < pair.tolerance < 1e-3 * float(pair.logits.abs().max())

    def test_whole_prefill(self, pair: Pair) -> None:
        pair.check(Runner(pair.config, pair.model).step({}, {0: pair.tokens})[0])

    def test_torch_operators(self, pair: Pair) -> None:
        """The column of machines without native kernels: a prefill, and decodes after it."""
        model = load_model(pair.folder, pair.config, CPU, compute=ComputeConfig(kernels="torch"))
        assert model.recorder is None
        runner = Runner(pair.config, model)
        rows = [runner.step({}, {0: pair.tokens[:70]})[0]]
        rows += [runner.step({0: token})[0] for token in pair.tokens[70:75]]
        pair.check(torch.cat(rows))

    def test_chunked_prefill(self, pair: Pair) -> None:
        runner = Runner(pair.config, pair.model)
        parts = [runner.step({}, {0: part})[0] for part in _cut(pair.tokens, [50, 1, 129, 120])]
        pair.check(torch.cat(parts))

    def test_decode_after_prefill(self, pair: Pair) -> None:
        runner = Runner(pair.config, pair.model)
        runner.step({}, {0: pair.tokens[:70]})
        rows = [runner.step({0: token})[0] for token in pair.tokens[70:110]]
        pair.check(torch.cat(rows), 70)

    @pytest.mark.parametrize("aligned", everyday((False, True), (True,)))
    def test_mixed_batches(self, pair: Pair, aligned: bool) -> None:
        """Sequences decode, prefill in chunks and start in the same steps, all of one text."""
        runner = Runner(pair.config, pair.model, aligned=aligned)
        t = pair.tokens
        done = {key: 0 for key in range(5)}
        steps: list[tuple[list[int], dict[int, int]]] = [
            ([], {0: 65, 1: 1, 2: 15}),
            ([0, 1, 2], {3: 64}),
            ([0, 2], {1: 70, 3: 1, 4: 200}),
            ([4], {0: 2}),
            ([0, 1, 2, 3, 4], {}),
            ([4, 3, 2, 1, 0], {}),
        ]
        for decoding, chunks in steps:
            decodes = {key: t[done[key]] for key in decoding}
            prefills = {key: t[done[key] : done[key] + n] for key, n in chunks.items()}
            for key, logits in runner.step(decodes, prefills).items():
                pair.check(logits, done[key])
                done[key] += len(logits)

    @pytest.mark.parametrize("aligned", everyday((False, True), (True,)))
    def test_greedy_tokens(self, pair: Pair, aligned: bool) -> None:
        runner = Runner(pair.config, pair.model, aligned=aligned)
        prompts = dict(enumerate([pair.tokens[:33], pair.tokens[40:41], pair.tokens[100:229]]))
        margin = 2 * pair.tolerance
        for key, chosen in runner.greedy(prompts, 200).items():
            assert first_wrong_choice(pair.reference, prompts[key], chosen, margin=margin) is None

    def test_bfloat16_is_as_near_to_float32_as_the_reference_is(self, pair: Pair) -> None:
        config, model = load(pair.folder, "bfloat16")
        runner = Runner(config, model)
        parts = [runner.step({}, {0: pair.tokens[:90]})[0]]
        parts += [runner.step({0: token})[0] for token in pair.tokens[90:110]]
        theirs = type(pair.reference).from_pretrained(pair.folder, dtype=torch.bfloat16)
        expected = pair.logits[:110]
        their_error = reference_logits(theirs, pair.tokens[:110]).float() - expected
        our_error = torch.cat(parts) - expected
        assert our_error.abs().mean() < 1.5 * their_error.abs().mean()


def _cut(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    return [part.tolist() for part in torch.tensor(tokens).split_with_sizes(sizes)]
