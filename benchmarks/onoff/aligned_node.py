"""`python -m benchmarks.onoff.aligned_node NAME ...`: a decode node without the per-request skip.

Its Mamba groups take part in the local hit although the peer brings their states: what vLLM did
before #42524 and its successors. Only this benchmark can switch it; the product has no such option.
"""

import sys

from connector.registry import builder_of
from engine.kv_cache import manager
from engine.kv_cache.coordinator import Coordinator, PrefixHit
from engine.kv_cache.coverage import NOTHING, Coverage
from engine.kv_cache.prefix import PrefixDigests
from serving.cli import node_app
from serving.node.server import NodeServer


class AlignedCoordinator(Coordinator):
    """The local part of a remote hit ends where this node has the states too."""

    def find(self, prefix: PrefixDigests, limit: int, external: Coverage) -> PrefixHit:
        """What the product finds, with less of it from here."""
        hit = super().find(prefix, limit, external)
        if external is NOTHING or hit.num_local == hit.num_tokens:
            return hit
        num_local = self._whole_blocks(min(hit.num_local, self.start_with_states(prefix, limit)))
        attention = {
            group: kind.lookup(self._pool, prefix, group).hit(num_local)
            for group, kind in self._kinds.items()
        }
        local = tuple(
            num_local if group in attention else tokens for group, tokens in enumerate(hit.local)
        )
        return hit._replace(attention=attention, local=local)

    def start_with_states(self, prefix: PrefixDigests, limit: int) -> int:
        """Tokens after which this node has attention and states; its own requests leave some."""
        return super().find(prefix, limit, NOTHING).num_tokens


class StatelessCoordinator(AlignedCoordinator):
    """vLLM's decode nodes cached no state of a pulled prompt at all: no hit, by construction."""

    def start_with_states(self, prefix: PrefixDigests, limit: int) -> int:
        """None."""
        return 0


COORDINATORS = {"aligned": AlignedCoordinator, "stateless": StatelessCoordinator}

if __name__ == "__main__":
    vars(manager)["Coordinator"] = COORDINATORS[sys.argv.pop(1)]
    node_app("decode", 0, lambda config: NodeServer(config, "decode", builder_of))()
