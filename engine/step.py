"""The messages of one engine step, from the scheduler to the worker and back.

They hold ids and numbers only, so they can cross to a worker process (tensor parallelism).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from engine.errors import TandemError
from engine.kv_cache.tables import BlockCopy
from engine.types import GenerateOutput, PromptLogprobs, SamplingParams, TokenId, TokenLogprob

NO_TOKENS: frozenset[TokenId] = frozenset()
NO_COUNTS: Mapping[TokenId, int] = MappingProxyType({})
UNKNOWN_TOKEN: TokenId = -1
"""The token of a decode that is launched before the step before it has been read."""
MAX_STOPS = 16
"""Tokens that end a request, beyond which it does not run one step ahead."""


class StateSave(msgspec.Struct, frozen=True):
    """Keep the states after `num_tokens` tokens of a sequence: of Mamba group g in `states[g]`."""

    num_tokens: int
    states: dict[int, int]


class SamplingInput(msgspec.Struct, frozen=True):
    """The input for choosing one token.

    `position`: number of tokens before it; it seeds the draw. `forbidden` tokens are never chosen.
    `allowed`: with a grammar or `allowed_token_ids`, a bit per token that may come next, least
    significant first; tokens beyond the last bit may not. `seen` (prompt and output) and `counts`
    (output, by token) are given when a penalty needs them, as the scheduler's own sets.
    """

    params: SamplingParams
    position: int
    forbidden: frozenset[TokenId] = NO_TOKENS
    seen: Set[TokenId] = NO_TOKENS
    counts: Mapping[TokenId, int] = NO_COUNTS
    allowed: bytes = b""


class PromptTargets(msgspec.Struct, frozen=True):
    """The log-probabilities that a chunk of a prompt is asked for.

    Token `token_ids[i]` of the prompt follows row `first_row` + i of the chunk; `num_top`
    alternatives are wanted besides it.
    """

    first_row: int
    token_ids: Sequence[TokenId]
    num_top: int


class ScheduledRequest(msgspec.Struct, frozen=True):
    """The next `token_ids` of one request, after `num_computed_tokens`.

    `tables[g]`: its blocks in KV cache group g. They are the scheduler's own lists, to be read
    within this step. `sampling`: given when `token_ids` reach the end of the known tokens.

    A decode one step ahead has the token that the step before chooses for it, in place of
    `UNKNOWN_TOKEN`, unless that token is one of its `stops`: then the request ends there, and no
    byte may be written for it.
    """

    request_id: str
    token_ids: Sequence[TokenId]
    num_computed_tokens: int
    tables: Sequence[Sequence[int]]
    sampling: SamplingInput | None = None
    saves: tuple[StateSave, ...] = ()
    targets: PromptTargets | None = None
    stops: tuple[TokenId, ...] = ()

    @property
    def is_ahead(self) -> bool:
        """True if its token is not known yet."""
        return self.token_ids[0] == UNKNOWN_TOKEN

    @property
    def end(self) -> int:
        """Tokens that have K/V and states after this step."""
        return self.num_computed_tokens + len(self.token_ids)


@dataclass(slots=True, frozen=True)
class BlockLoad:
    """One request's load: the connector fills in blocks, then the rest of the prompt is computed.

    `tables[g]`: the request's blocks in KV cache group g. `ranges[g]`: the tokens to fill in there.
    For a Mamba group a range that is not empty means the state after `num_tokens` tokens.

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
    """A failed load of KV cache group `group`, by cause (`connector.pd.causes` for hand-overs).

    The tokens before `num_good_tokens` are good. With `group` None nothing of the load may be used.
    """

    request_id: str
    cause: str
    group: int | None = None
    num_good_tokens: int = 0


@dataclass(slots=True, frozen=True)
class BlockSave:
    """Cached blocks and states, by KV cache group, that stay in place until they are saved."""

    save_id: str
    blocks: Mapping[int, Sequence[int]]


@dataclass(slots=True, frozen=True)
class ConnectorMeta:
    """One step's message from the scheduler side of a connector to its worker side.

    `message` is opaque to the engine; msgspec can encode it. The engine keeps the blocks of `saves`
    in place until `ConnectorOutput.saved` names them.
    """

    message: Any = None
    saves: tuple[BlockSave, ...] = ()


@dataclass(slots=True, frozen=True)
class ConnectorOutput:
    """The transfers that ended since the last step; `message` is for the scheduler side.

    `loaded` and `failed`: one entry for each load, or part of a load, that ended. `released`: one
    entry for each hold that ended. `saved`: save ids whose blocks have been read. `filled_from`: by
    request, of loads that could not fill a window's first block from its start: the first token
    that is filled in, by KV cache group.
    """

    loaded: tuple[str, ...] = ()
    failed: tuple[LoadFailure, ...] = ()
    released: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    message: Any = None
    filled_from: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_news(self) -> bool:
        """True if the next step may find work because of it."""
        return bool(self.loaded or self.failed or self.released or self.saved)


@dataclass(slots=True, frozen=True)
class SchedulerOutput:
    """One step's work; the worker first zeroes `new_states` and makes `copies`."""

    scheduled: tuple[ScheduledRequest, ...]
    new_states: tuple[tuple[int, int], ...]
    copies: tuple[BlockCopy, ...]
    connector: Any = None


class SampledToken(msgspec.Struct, frozen=True):
    """One token chosen for one request, with log-probabilities if the request asks for them."""

    token_id: TokenId
    logprob: TokenLogprob | None


@dataclass(slots=True, frozen=True)
class ModelRunnerOutput:
    """One token for each request whose known tokens are all computed; errors of failed ones.

    `prompt_logprobs`: of the rows that requests asked for.
    """

    sampled: dict[str, SampledToken] = field(default_factory=dict)
    failed: dict[str, TandemError] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class StepNews:
    """The news of one step: outputs per request, and errors that end requests."""

    outputs: list[tuple[str, GenerateOutput]] = field(default_factory=list)
    errors: list[tuple[str, TandemError]] = field(default_factory=list)
