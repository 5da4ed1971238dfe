"""What flows through one engine step, from the scheduler to the worker and back.

Ids and numbers only: a worker in another process could be sent the same (tensor parallelism).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import EngineGenerateError, TandemError
from engine.kv_cache.tables import BlockCopy
from engine.types import GenerateOutput, SamplingParams, TokenId, TokenLogprob


@dataclass(slots=True, frozen=True)
class StateSave:
    """Keep the states after `num_tokens` tokens of a sequence: of Mamba group g in `states[g]`."""

    num_tokens: int
    states: dict[int, int]


@dataclass(slots=True, frozen=True)
class SamplingInput:
    """How one token is chosen.

    `position`: tokens before it, which seed the draw. `forbidden`: tokens that may not be chosen.
    `seen` (prompt and output) and `counts` (output, by token) are given when a penalty needs them.
    """

    params: SamplingParams
    position: int
    forbidden: frozenset[TokenId] = frozenset()
    seen: frozenset[TokenId] = frozenset()
    counts: dict[TokenId, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class ScheduledRequest:
    """The next `token_ids` of one request, after `num_computed_tokens`.

    `tables[g]`: its blocks in KV cache group g. They are the scheduler's own lists, to be read
    within this step. `sampling`: given when `token_ids` reach the end of the known tokens.
    """

    request_id: str
    token_ids: Sequence[TokenId]
    num_computed_tokens: int
    tables: Sequence[Sequence[int]]
    sampling: SamplingInput | None = None
    saves: tuple[StateSave, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Tokens that have K/V and states after this step."""
        return self.num_computed_tokens + len(self.token_ids)


@dataclass(slots=True, frozen=True)
class BlockLoad:
    """What a connector fills in for one request, which then starts after `num_tokens` tokens.

    `tables[g]`: its blocks in KV cache group g. `ranges[g]`: the tokens to fill in there; of a
    Mamba group it is the state after `num_tokens`, unless the range is empty.

        tokens     0 ........ local ............... num_tokens ........ prompt end
        attention  | is here  |  <-- ranges[g] -->  |     is computed     |
        state                                       ^ one, after num_tokens
    """

    request_id: str
    tables: tuple[tuple[int, ...], ...]
    num_tokens: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(slots=True, frozen=True)
class LoadFailure:
    """What a load could not fill in of KV cache group `group`, and why.

    The tokens before `num_good_tokens` are good. `group` None: nothing of the load may be used.
    """

    request_id: str
    cause: str
    group: int | None = None
    num_good_tokens: int = 0


@dataclass(slots=True, frozen=True)
class BlockSave:
    """Findable blocks and states, by KV cache group, that stay until a save of them has ended."""

    save_id: str
    blocks: Mapping[int, Sequence[int]]


@dataclass(slots=True, frozen=True)
class ConnectorMeta:
    """One step's word from the scheduler side of a connector.

    `message` is for its own worker side and opaque to the engine; msgspec can encode it. `saves`
    are blocks to be kept in place for the engine's part.
    """

    message: Any = None
    saves: tuple[BlockSave, ...] = ()


@dataclass(slots=True, frozen=True)
class ConnectorOutput:
    """What transfers did since the last step; `message` is for the connector's scheduler side.

    `loaded` and `failed`: one entry for each load or part of it that ended. `released`: one entry
    for each hold that ended. `saved`: save ids whose blocks are not read any longer.
    """

    loaded: tuple[str, ...] = ()
    failed: tuple[LoadFailure, ...] = ()
    released: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    message: Any = None

    @property
    def is_news(self) -> bool:
        """Whether the next step may find work because of it."""
        return bool(self.loaded or self.failed or self.released or self.saved)


@dataclass(slots=True, frozen=True)
class SchedulerOutput:
    """One step's work; before all else `new_states` are zeroed and `copies` are made."""

    scheduled: tuple[ScheduledRequest, ...]
    new_states: tuple[tuple[int, int], ...]
    copies: tuple[BlockCopy, ...]
    connector: Any = None


@dataclass(slots=True, frozen=True)
class SampledToken:
    """One token chosen for one request, with log-probabilities when they were asked for."""

    token_id: TokenId
    logprob: TokenLogprob | None


@dataclass(slots=True, frozen=True)
class ModelRunnerOutput:
    """One token for each request that reached its end; or why computing a request failed."""

    sampled: dict[str, SampledToken] = field(default_factory=dict)
    failed: dict[str, EngineGenerateError] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class StepNews:
    """What one step tells the outside: outputs per request, and errors that end requests."""

    outputs: list[tuple[str, GenerateOutput]] = field(default_factory=list)
    errors: list[tuple[str, TandemError]] = field(default_factory=list)
