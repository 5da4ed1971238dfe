"""The start of a request: the cached prefix here, plus what a connector can load.

Reads only. Knows the seam, but no steps, queues or budgets.
"""

from typing import NamedTuple

from engine.kv_cache.coordinator import PrefixHit
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.tables import BlockTables
from engine.kv_connector import Match, SchedulerConnector
from engine.request import Request
from engine.step import BlockLoad

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
