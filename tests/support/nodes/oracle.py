"""Random Hugging Face checkpoints, and our models run on them as an engine would.

The arena is filled with noise and block tables are random, so anything read from a wrong place
shows; blocks before a sliding window are given back and stand as one null block full of NaN. Needs
transformers, which only tests depend on.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.families.registry import read_config
from engine.forward import (
    AttentionCache,
    AttentionIndex,
    ForwardBatch,
    GroupIndex,
    SequenceLens,
    StateCache,
    StateIndex,
)
from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.kv_cache.spec import MambaSpec, SlidingWindowSpec
from engine.model_configs.model_config import ModelConfig
from engine.models.loader import CausalLM, load_model
from engine.worker.kv_caches import layer_caches, page_row

BLOCK_SIZE = 16
UNITS = 64
NOISE = 10.0


def load(folder: Path, dtype: str | None = None) -> tuple[ModelConfig, CausalLM]:
    """Our model of the checkpoint in `folder`; every tensor must have been taken."""
    config = read_config(folder, dtype)
    return config, load_model(folder, config, torch.device("cpu"))


@dataclass(slots=True)
class Sequence:
    """The place of one sequence: tokens so far, and per group its block ids or its one unit."""

    length: int
    blocks: list[list[int]]


class Runner:
    """Steps a model over sequences whose blocks and states lie scattered in a noisy arena.

    `aligned` puts states in consecutive units, in order of first appearance, so that `decode_run`
    is used.
    """

    def __init__(
        self, config: ModelConfig, model: CausalLM, *, aligned: bool = False, seed: int = 0
    ) -> None:
        self.model = model
        self.aligned = aligned
        self.draw = torch.Generator().manual_seed(seed)
        self.plan = _plan(config)
        noise = torch.randn(self.plan.arena_bytes // 4, generator=self.draw) * NOISE
        self.caches = layer_caches(noise.view(torch.uint8), self.plan)
        self.sequences: dict[int, Sequence] = {}
        self._units = torch.randperm(UNITS, generator=self.draw).tolist()
        if aligned:
            self._units.sort(reverse=True)
        self._free: list[list[int]] = [[] for _ in self.plan.groups]
        self._null = {
            group: self._null_block(group)
            for group, members in enumerate(self.plan.groups)
            if isinstance(members.spec, SlidingWindowSpec)
        }

    def greedy(self, prompts: dict[int, list[int]], tokens: int) -> dict[int, list[int]]:
        """`tokens` greedy tokens after each prompt: a batch of prompts, then batches of decodes."""
        logits = self.step({}, prompts)
        chosen: dict[int, list[int]] = {key: [] for key in prompts}
        for _ in range(tokens - 1):
            for key, rows in logits.items():
                chosen[key].append(int(rows[-1].argmax()))
            logits = self.step({key: own[-1] for key, own in chosen.items()})
        for key, rows in logits.items():
            chosen[key].append(int(rows[-1].argmax()))
        return chosen

    def step(
        self, decodes: dict[int, int], prefills: dict[int, list[int]] | None = None
    ) -> dict[int, Tensor]:
        """One batch: a token for each of `decodes`, a chunk for each of `prefills`.

        Returns the logits [n, vocab] of every token, by sequence.
        """
        work = {key: [token] for key, token in decodes.items()} | (prefills or {})
        for key, tokens in work.items():
            self._make_room(key, len(tokens))
        batch = self._batch(work, len(decodes))
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, self.caches))
        for key, tokens in work.items():
            self.sequences[key].length += len(tokens)
            self._leave_window(key)
        return dict(zip(work, logits.split_with_sizes(batch.lens.query_lens), strict=True))

    def _make_room(self, key: int, tokens: int) -> None:
        groups = range(len(self.plan.groups))
        sequence = self.sequences.setdefault(key, Sequence(0, [[] for _ in groups]))
        for group in groups:
            missing = self.plan.blocks_for(group, sequence.length + tokens)
            missing -= len(sequence.blocks[group])
            new = [self._new_block(group) for _ in range(missing)]
            sequence.blocks[group] += new
            if isinstance(self.plan.groups[group].spec, MambaSpec):
                self._zero(group, new)

    def _null_block(self, group: int) -> int:
        """A block that nothing may read: K and V of all layers are NaN."""
        block = self._new_block(group)
        for layer in self.plan.groups[group].layers:
            cache = self.caches[group, layer]
            assert isinstance(cache, AttentionCache)
            cache.k_pages[page_row(self.plan, group, block)] = float("nan")
            cache.v_pages[page_row(self.plan, group, block)] = float("nan")
        return block

    def _leave_window(self, key: int) -> None:
        """Frees blocks that lie wholly before the window of the next token."""
        sequence = self.sequences[key]
        for group, null in self._null.items():
            spec, blocks = self.plan.groups[group].spec, sequence.blocks[group]
            assert isinstance(spec, SlidingWindowSpec)
            behind = max(0, sequence.length - spec.window + 1) // BLOCK_SIZE
            self._free[group][:0] = [block for block in blocks[:behind] if block != null]
            blocks[:behind] = [null] * behind

    def _new_block(self, group: int) -> int:
        """A free block of `group`; units are taken four at a time and their blocks shuffled."""
        free = self._free[group]
        per_unit = self.plan.blocks_per_unit[group]
        if not free:
            state = isinstance(self.plan.groups[group].spec, MambaSpec)
            taken = 1 if state else 4
            units = [self._units.pop() if state else self._units.pop(0) for _ in range(taken)]
            blocks = [unit * per_unit + slot for unit in units for slot in range(per_unit)]
            order = torch.randperm(len(blocks), generator=self.draw).tolist()
            free += [blocks[place] for place in order]
        return free.pop()

    def _zero(self, group: int, units: list[int]) -> None:
        for layer in self.plan.groups[group].layers:
            cache = self.caches[group, layer]
            assert isinstance(cache, StateCache)
            for part in cache.parts:
                part[units] = 0

    def _batch(self, work: dict[int, list[int]], decodes: int) -> ForwardBatch:
        contexts = [self.sequences[key].length for key in work]
        lens = [len(tokens) for tokens in work.values()]
        packed = SequenceLens(decodes, lens, contexts)
        positions = torch.tensor(
            [
                position
                for context, n in zip(contexts, lens, strict=True)
                for position in range(context, context + n)
            ]
        )
        return ForwardBatch(
            token_ids=torch.tensor([token for tokens in work.values() for token in tokens]),
            positions=positions,
            lens=packed,
            group_index=tuple(
                self._index(group, work, packed, positions)
                for group in range(len(self.plan.groups))
            ),
            logits_rows=torch.arange(len(positions)),
        )

    def _index(
        self, group: int, work: dict[int, list[int]], lens: SequenceLens, positions: Tensor
    ) -> GroupIndex:
        spec = self.plan.groups[group].spec
        blocks = [self.sequences[key].blocks[group] for key in work]
        if isinstance(spec, MambaSpec):
            units = [own[0] for own in blocks]
            return StateIndex(torch.tensor(units), _run(units[: lens.num_decodes]), lens)
        rows = [[page_row(self.plan, group, block) for block in own] for own in blocks]
        longest = max(len(own) for own in rows)
        tables = [own + [rows[0][-1]] * (longest - len(own)) for own in rows]
        slots = [
            (own[position // BLOCK_SIZE] * spec.num_kv_heads + head) * BLOCK_SIZE
            + position % BLOCK_SIZE
            for own, (key, tokens) in zip(rows, work.items(), strict=True)
            for position in _span(self.sequences[key].length, len(tokens))
            for head in range(spec.num_kv_heads)
        ]
        return AttentionIndex(torch.tensor(tables), torch.tensor(slots), positions, lens)


def _plan(config: ModelConfig) -> ArenaPlan:
    one = plan_arena(config.groups, BLOCK_SIZE, 1 << 30)
    return plan_arena(config.groups, BLOCK_SIZE, one.unit_bytes * UNITS)


def _span(start: int, length: int) -> range:
    return range(start, start + length)


def _run(units: list[int]) -> slice | None:
    if units and units == list(_span(units[0], len(units))):
        return slice(units[0], units[0] + len(units))
    return None


def reference_logits(reference: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The reference's logits [n, vocab] of one sequence, in one go and without a cache."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


def rounding_errors(reference: PreTrainedModel, tokens: list[int]) -> Tensor:
    """How far each row [n] of the reference's logits is from its own, taken token by token."""
    whole = reference_logits(reference, tokens)
    rows = []
    cache = None
    with torch.inference_mode():
        for position, token in enumerate(tokens):
            # Positions are given because Bamba would count every token as its first.
            out = reference(
                torch.tensor([[token]]),
                position_ids=torch.tensor([[position]]),
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            rows.append(out.logits[0])
    return (torch.cat(rows) - whole).abs().amax(dim=1)


def first_wrong_choice(
    reference: PreTrainedModel, prompt: list[int], chosen: list[int], *, margin: float
) -> int | None:
    """The first of `chosen` that is not the reference's greedy token, or None.

    A choice within `margin` of the reference's best logit is accepted: there rounding decides. As
    every choice is judged after our own prefix, None means that greedy decoding is equal (up to
    such ties).
    """
    logits = reference_logits(reference, prompt + chosen[:-1])[len(prompt) - 1 :]
    best = logits.max(-1).values
    ours = logits.gather(1, torch.tensor(chosen).unsqueeze(1)).squeeze(1)
    wrong = (best - ours >= margin).nonzero()
    return int(wrong[0]) if len(wrong) else None
