"""Where a request starts: what is here, and what comes from another node behind that.

Reads only. Knows the seam, and nothing of steps, queues or budgets.
"""

from typing import NamedTuple

from engine.kv_cache.checkpoints import checkpoint_positions
from engine.kv_cache.coordinator import PrefixHit
from engine.kv_cache.manager import KVCacheManager
from engine.kv_connector import SchedulerConnector
from engine.request import Request


class Start(NamedTuple):
    """A local hit, and how many tokens right behind it are loaded."""

    hit: PrefixHit
    num_external: int

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed here."""
        return self.hit.num_tokens + self.num_external

    def checkpoints(self, num_prompt_tokens: int, block_size: int) -> tuple[int, ...]:
        """Where the rest of the prompt keeps its states; see `checkpoint_positions`."""
        return checkpoint_positions(
            self.num_tokens, self.hit.branch_point, num_prompt_tokens, block_size=block_size
        )


def find_start(
    request: Request, limit: int, *, cache: KVCacheManager, connector: SchedulerConnector
) -> Start:
    """The best start after at most `limit` tokens that are here.

    All of the known tokens but the last may hit: that one is computed to get its logits. The
    connector is asked what it adds to a hit that the request could go on from by itself. If it adds
    something, what the Mamba groups lack does not shorten the hit any more, since their states come
    too; it ends before the last token that is loaded, or nothing would be.
    """
    hit = cache.find_hit(request.prefix, limit)
    if not request.skip_mamba_align:
        return Start(hit, 0)
    num_external = connector.get_num_new_matched_tokens(request, hit.num_tokens)
    if not num_external:
        return Start(hit, 0)
    end = hit.num_tokens + num_external
    skipping = cache.find_hit(request.prefix, min(limit, end - 1), skip_mamba=True)
    return Start(skipping, end - skipping.num_tokens)
