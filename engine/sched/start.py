"""Where a request starts: what is here, and what a connector fills in.

Reads only. Knows the seam, and nothing of steps, queues or budgets.
"""

from typing import NamedTuple

from engine.kv_cache.checkpoints import checkpoint_positions
from engine.kv_cache.coordinator import PrefixHit
from engine.kv_cache.manager import KVCacheManager
from engine.kv_connector import Match, SchedulerConnector
from engine.request import Request

MAX_LOADS = 3
"""Loads of one request that may fail before it is computed here, whatever the connector offers."""


class Start(NamedTuple):
    """The hit to start from, and the connector's offer, if it had one."""

    hit: PrefixHit
    match: Match | None

    @property
    def needs_load(self) -> bool:
        """Whether some group lacks something that the connector fills in."""
        return min(self.hit.local, default=0) < self.hit.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens at the start that are complete here before any load."""
        return self.hit.num_local if self.needs_load else self.hit.num_tokens

    def checkpoints(self, num_prompt_tokens: int, block_size: int) -> tuple[int, ...]:
        """Where the rest of the prompt keeps its states; see `checkpoint_positions`."""
        return checkpoint_positions(
            self.hit.num_tokens, self.hit.branch_point, num_prompt_tokens, block_size=block_size
        )


def find_start(
    request: Request, *, cache: KVCacheManager, connector: SchedulerConnector, reuse: bool = True
) -> Start | None:
    """The best start of `request`; None while the connector does not know what it can load.

    All of the known tokens but the last may hit: that one is computed to get its logits. The
    connector is asked what it adds to a hit that the request could go on from by itself. Where it
    brings states, the Mamba groups' own do not shorten the hit (vLLM #42524), and where it brings
    attention, that of the states here may reach further. Without `reuse` nothing here is a hit.
    """
    limit = request.num_tokens - 1
    hit = cache.find_hit(request.prefix, limit, reuse=reuse)
    if request.num_failed_loads == MAX_LOADS:
        return Start(hit, None)
    match = connector.match(request, hit.num_tokens)
    if match is None:
        return Start(hit, None)
    if match.is_pending:
        return None
    return Start(cache.find_hit(request.prefix, limit, match.coverage, reuse=reuse), match)
