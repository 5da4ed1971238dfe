"""What flows through one engine step, from the scheduler to the worker and back.

Torch-free; inside one process, so plain dataclasses.
"""

from dataclasses import dataclass, field

from engine.errors import EngineGenerateError
from engine.kv_cache.mamba_states import Checkpoint
from engine.kv_cache.tables import BlockCopy
from engine.request import Request
from engine.types import TokenId, TokenLogprob


@dataclass(slots=True, frozen=True)
class ScheduledRequest:
    """`num_tokens` of `request` from its first uncomputed one; `samples` if they reach its end.

    `checkpoints`: where to put the states that are kept from these tokens.
    """

    request: Request
    num_tokens: int
    samples: bool
    checkpoints: tuple[Checkpoint, ...] = ()


@dataclass(slots=True, frozen=True)
class BlockPull:
    """A remote prefill to load: its blocks, whose leading `num_local_tokens` are here already."""

    request_id: str
    tables: tuple[tuple[int, ...], ...]
    num_local_tokens: int


@dataclass(slots=True, frozen=True)
class ConnectorMeta:
    """This step's message from the scheduler connector to the worker connector."""

    pulls: tuple[BlockPull, ...] = ()


@dataclass(slots=True, frozen=True)
class SchedulerOutput:
    """One step's work; before all else `new_states` are zeroed and `copies` are made."""

    scheduled: tuple[ScheduledRequest, ...]
    new_states: tuple[tuple[int, int], ...]
    copies: tuple[BlockCopy, ...]
    connector: ConnectorMeta


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
class ConnectorOutput:
    """What transfers did since the last step: requests loaded, failed (and why) and released."""

    loaded: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    released: tuple[str, ...] = ()
