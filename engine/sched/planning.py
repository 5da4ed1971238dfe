"""One request's part of a step: its start, its next chunk, its load, and the worker's input.

Reads and counts only: `Scheduler` moves requests and blocks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.coordinator import PrefixHit
from engine.kv_cache.mamba_states import Checkpoint
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.tables import BlockTables
from engine.kv_connector import Match, SchedulerConnector
from engine.request import Request
from engine.step import (
    MAX_STOPS,
    NO_COUNTS,
    NO_TOKENS,
    UNKNOWN_TOKEN,
    BlockLoad,
    LoadFailure,
    PromptTargets,
    SamplingInput,
    ScheduledRequest,
    StateSave,
)

MAX_LOADS = 3
"""After so many failed loads a request is computed here, whatever the connector offers."""


class Start(NamedTuple):
    """The hit to start from, and the connector's match, if it had one."""

    hit: PrefixHit
    match: Match | None

    @property
    def needs_load(self) -> bool:
        """True if some group lacks blocks of the hit, which the connector must load."""
        return min(self.hit.local, default=0) < self.hit.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens that are complete here before any load."""
        return self.hit.num_local if self.needs_load else self.hit.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens that nobody computes for this request: here, in a tier, or at a peer."""
        of_sender = None if self.match is None else self.match.num_cached_tokens
        return self.hit.num_tokens if of_sender is None else min(of_sender, self.hit.num_tokens)

    def block_load(self, request_id: str, tables: BlockTables) -> BlockLoad:
        """The load of what is missing here, into the blocks of `tables`."""
        end = self.hit.num_tokens
        ranges = tuple((local, end) for local in self.hit.local)
        return BlockLoad(request_id, tuple(map(tuple, tables.groups)), end, ranges)


def find_start(
    request: Request, *, cache: KVCacheManager, connector: SchedulerConnector, reuse: bool = True
) -> Start | None:
    """The best start of `request`; None while the connector does not know what it can load.

    The hit may cover `request.max_hit` tokens. The connector says what it can add to the hit of
    this node. If it brings states, the Mamba groups' own states do not shorten the hit (vLLM
    #42524). If it brings attention blocks, the states here may reach further. Without `reuse` the
    blocks of this node do not count.
    """
    limit = request.max_hit
    # Twice: the connector hears what is here anyway, and what it offers may change what is used.
    hit = cache.find_hit(request.prefix, limit, reuse=reuse)
    if request.num_failed_loads == MAX_LOADS:
        return Start(hit, None)
    match = connector.match(request, hit.num_tokens)
    if match is None:
        return Start(hit, None)
    if match.is_pending:
        return None
    return Start(cache.find_hit(request.prefix, limit, match.coverage, reuse=reuse), match)


def plan_prefill_chunk(
    num_computed_tokens: int, num_prompt_tokens: int, num_tokens: int, *, budget: int
) -> int:
    """The number of tokens to compute next, at most `budget`.

    A chunk never crosses the end of the prompt. Generated tokens that must be recomputed (after a
    preemption or a failed load) get chunks of their own, so the prompt's chunks, and with them its
    rounding, stay the same.
    """
    end = num_prompt_tokens if num_computed_tokens < num_prompt_tokens else num_tokens
    return min(end - num_computed_tokens, budget)


@dataclass(slots=True)
class Load:
    """One request's load: the number of parts in flight, and the failures so far.

    `filled_from`: see `ConnectorOutput`; empty where every block is filled from its start.
    """

    request: Request
    num_open: int
    failures: list[LoadFailure] = field(default_factory=list)
    filled_from: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.num_open, "a load without an end would never let its request start"

    def end_part(self, failure: LoadFailure | None) -> None:
        """Counts the end of one part."""
        self.num_open -= 1
        if failure is not None:
            self.failures.append(failure)

    def num_good_tokens(self, plan: ArenaPlan) -> int:
        """Leading tokens whose K/V is good in all attention groups; states do not count."""
        good = self.request.num_loading_tokens
        for failure in self.failures:
            if failure.group is None:
                return 0
            if failure.group not in plan.state_groups:
                good = min(good, failure.num_good_tokens)
        return good


class Planned(msgspec.Struct):
    """`num_tokens` of `request` from `start` on; they count as computed once the worker returns.

    `positions`: after which its states are worth keeping; `checkpoints`: those that found room.
    """

    request: Request
    start: int
    num_tokens: int
    positions: tuple[int, ...]
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def end(self) -> int:
        """Tokens that are computed after it."""
        return self.start + self.num_tokens

    @property
    def is_last(self) -> bool:
        """True if the request ends with the token that this step chooses, whichever that is."""
        request = self.request
        return self.end == request.num_tokens and request.num_tokens + 1 >= request.max_total_tokens

    @property
    def goes_on(self) -> bool:
        """True if the request decodes in the next step, whatever token this one chooses for it.

        Unless it `is_last`, or the token is one of its stops, of which the worker takes a few. The
        next choice must need no more than the parameters: grammars, bad words and penalties need
        the token itself.
        """
        request, params = self.request, self.request.sampling
        return (
            self.end == request.num_tokens
            and request.num_output_tokens + 1 >= params.min_tokens
            and len(request.eos_token_ids) + len(params.stop_token_ids) <= MAX_STOPS
            and request.matcher is None
            and request.bad_words is None
            and params.repetition_penalty == 1.0
            and params.presence_penalty == params.frequency_penalty == 0.0
        )

    def worker_input(self) -> ScheduledRequest:
        """The worker's view; it samples only if the step computes the last known token."""
        request, tokens = self.request, self.request.token_ids
        assert request.blocks is not None
        is_ahead = self.start == len(tokens)
        stops = (*request.eos_token_ids, *request.sampling.stop_token_ids) if is_ahead else ()
        return ScheduledRequest(
            request.request_id,
            (UNKNOWN_TOKEN,) if is_ahead else tokens[self.start : self.end],
            self.start,
            request.blocks.groups,
            _sampling_input(request, self.end) if self.end >= len(tokens) else None,
            tuple([StateSave(kept.num_tokens, kept.states) for kept in self.checkpoints]),
            None
            if request.sampling.prompt_logprobs is None
            else _targets(request, self.start, self.end),
            stops,
        )


def _targets(request: Request, start: int, end: int) -> PromptTargets | None:
    """The prompt's tokens after those of the chunk, as far as their log-probabilities miss."""
    #  tokens   start .. first .. end-1        first: the token before the first one that misses
    #  targets           first+1 .. end        the last token of the prompt has no target
    first = max(start, request.max_hit)
    targets = request.token_ids[first + 1 : min(end + 1, request.num_prompt_tokens)]
    if not targets:
        return None
    num_top = request.sampling.prompt_logprobs or 0
    return PromptTargets(first - start, targets, num_top)


def _sampling_input(request: Request, position: int) -> SamplingInput:
    """With no more than the parameters ask for: most requests need none of the sets."""
    params = request.sampling
    counted = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return SamplingInput(
        params,
        position,
        request.forbidden_tokens(position) if params.min_tokens or params.bad_words else NO_TOKENS,
        request.seen_tokens() if params.repetition_penalty != 1.0 else NO_TOKENS,
        request.token_counts if counted else NO_COUNTS,
        request.allowed_tokens(),
    )
