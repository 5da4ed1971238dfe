"""One pull that a test may spoil, in either direction: what P prefilled, or a turn that D kept."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engine.types import GenerateRequest, KVTransferParams
from serving.node.server import NodeServer
from tests.support.faults.fault_points import FaultInjector
from tests.support.nodes.cluster import Cluster, Generation, generate, settled, transfer_config
from tests.support.nodes.pairs import GREEDY, assert_equal, end_hold, prefill, prompt_of, request_of
from tests.support.nodes.turns import both_ways, first_turn, next_prompt, pair_of_nodes

PROMPT = prompt_of(100, salt=4)


@dataclass(slots=True)
class Pull:
    """`reader` may pull what `keeper` holds for `request`; `alone` answers it by itself.

    `before`: the turn that D decoded, where P reads and D only then answers.
    """

    reader: NodeServer
    keeper: NodeServer
    request: GenerateRequest
    kept: KVTransferParams
    alone: NodeServer
    before: tuple[int, ...] = ()

    async def read(self) -> Generation:
        """The reader's part."""
        return await generate(self.reader, self.request)

    async def check(self, read: Generation, *, was_pulled: bool) -> None:
        """The answer is bit-equal to that of one node, and nothing stays on either node."""
        assert read.last.was_pulled == was_pulled
        prompt, answer = self.request.prompt_token_ids, read
        if self.before:
            answer = await generate(
                self.keeper, request_of(prompt, GREEDY, read.last.kv_transfer_params)
            )
            await end_hold(self.keeper, answer.last.kv_transfer_params)
            if was_pulled:  # where D's scan was cut, the one node's must be, too
                await generate(self.alone, request_of(self.before))
        assert_equal(answer, await generate(self.alone, request_of(prompt)))
        await settled(self.keeper)
        await settled(self.reader)


async def there(
    cluster: Cluster,
    model: Path,
    transport: str,
    *,
    faults: FaultInjector,
    policy: str = "recompute",
) -> Pull:
    """D pulls what P prefilled."""
    p, d = await cluster.pair(model, transfer_config(transport, policy), on_d=faults)
    params = await prefill(p, PROMPT)
    return Pull(d, p, request_of(PROMPT, GREEDY, params), params, alone=p)


async def back(
    cluster: Cluster,
    model: Path,
    transport: str,
    *,
    faults: FaultInjector,
    policy: str = "recompute",
) -> Pull:
    """P pulls the turn that D decoded, and has forgotten its own part of it."""
    config = both_ways(transport, policy=policy)
    p, d = await pair_of_nodes(cluster, model, config, on_p=faults, d_caches=False)
    one = await cluster.start("decode", model, enable_prefix_caching=True)
    turn = await first_turn(p, d)
    request = request_of(next_prompt(turn), GREEDY, turn.kept)
    return Pull(p, d, request, turn.kept, alone=one, before=turn.prompt)


OpenPull = Callable[..., Awaitable[Pull]]
DIRECTIONS: Mapping[str, OpenPull] = MappingProxyType({"there": there, "back": back})
