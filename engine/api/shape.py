"""What differs between the two generating endpoints, as one protocol."""

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from engine.api.choices import Delta
from engine.api.plan import Plan
from engine.api.replies import Envelope, Usage
from engine.api.serving import Serving
from engine.api.tally import ReplyTally, UsageTally
from engine.types import KVTransferParams, TokenId


class Shape(Protocol):
    """Reads one endpoint's body, which holds up to `max_prompts`, and writes its replies."""

    max_prompts: int

    def plan(
        self, body: dict[str, Any], kv_params: KVTransferParams | None, serving: Serving
    ) -> Plan:
        """Plan of a body; raises InvalidRequestError leaves."""
        ...

    def reply(self, plan: Plan, tally: ReplyTally) -> Envelope:
        """Whole reply of a finished request."""
        ...

    def chunks(
        self, plan: Plan, delta: Delta, *, first: bool, usage: Usage | UnsetType | None
    ) -> Sequence[Envelope]:
        """Chunks of one delta; `first` is true once per choice. `usage` stands in each of them."""
        ...

    def closing(self, plan: Plan, tally: UsageTally) -> Envelope:
        """The extra chunk that has usage and no choices."""
        ...


def envelope_fields(plan: Plan) -> dict[str, Any]:
    """What every reply and chunk of a request repeats."""
    return {"id": plan.id, "created": plan.created, "model": plan.model}


def if_asked(plan: Plan, token_ids: tuple[TokenId, ...]) -> tuple[TokenId, ...] | UnsetType:
    """Token ids for a caller that set `return_token_ids`."""
    return token_ids if plan.return_token_ids else UNSET
