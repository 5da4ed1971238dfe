"""A simulated cluster: real index, prompts under way and policy; fake compute, links and time."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from random import Random
from statistics import fmean, quantiles
from time import perf_counter
from types import MappingProxyType

import msgspec

from benchmarks.cache.routing.agenda import Agenda
from benchmarks.cache.routing.event_feed import EventFeed, EventPath
from benchmarks.cache.routing.nodes import Decoder, Hardware, KnownNode, Prefiller
from benchmarks.cache.routing.requests import DigestedPrompt, Request
from proxy.cluster.node import NodeView
from proxy.routing.in_flight import InFlight
from proxy.routing.policies import POLICIES, Route, RoutingPolicy
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import RoutedPrompt

POLL_S = 1.0
"""Between two questions of the proxy to all nodes."""


class LongestPrefix:
    """The trap as a policy: the node that holds most of the prompt, whatever waits there."""

    def choose(
        self, prompt: RoutedPrompt, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        def held(node: NodeView) -> tuple[int, int]:
            return prompt.hit(node.name).attention, -node.num_in_flight

        return Route(max(prefill, key=held), max(decode, key=held), "prefix")


ALL_POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = MappingProxyType(
    {
        **{name: POLICIES[name] for name in ("round_robin", "least_loaded", "session")},
        "longest_prefix": LongestPrefix,
        "prefix_aware": POLICIES["prefix_aware"],
    }
)


class Served(msgspec.Struct, frozen=True):
    """One request: seconds until its first token, its tokens, those hit on P, the decision."""

    ttft_s: float
    num_tokens: int
    num_hit: int
    prefill: str
    decision_us: float


class Outcome(msgspec.Struct, frozen=True):
    """Figures over the requests that count; `busiest`: the largest share of one prefill node."""

    hit_share: float
    mean_s: float
    p90_s: float
    p99_s: float
    busiest: float
    decision_us: float
    num_repairs: int

    @classmethod
    def of(cls, served: Sequence[Served], num_repairs: int = 0) -> "Outcome":
        """Percentiles are interpolated between neighbours."""
        ttft = [request.ttft_s for request in served]
        cuts = quantiles(ttft, n=100, method="inclusive")
        on = [request.prefill for request in served]
        return cls(
            sum(r.num_hit for r in served) / sum(r.num_tokens for r in served),
            fmean(ttft),
            cuts[89],
            cuts[98],
            max(map(on.count, set(on))) / len(on),
            fmean(r.decision_us for r in served),
            num_repairs,
        )


class Simulator:
    """One run of one policy on as many prefill as decode nodes, whose caches begin empty."""

    def __init__(
        self, policy: str, num_nodes: int, hardware: Hardware, *, path: EventPath, seed: int = 0
    ) -> None:
        self._agenda = Agenda()
        self._policy = ALL_POLICIES[policy]()
        self._index = PrefixIndex()
        self._in_flight = InFlight(clock=lambda: self._agenda.now)
        self._events = hardware.events()
        random = Random(seed)
        names = [f"{kind}{number}" for kind in "pd" for number in range(num_nodes)]
        self._known = {name: KnownNode(name, hardware, self._agenda) for name in names}
        self._feeds = {
            name: EventFeed(name, self._index, agenda=self._agenda, path=path, random=random)
            for name in names
        }
        for name in names:
            self._index.set_node(name, self._events)
        self._prefillers = {
            name: Prefiller(hardware, self._agenda, self._feeds[name]) for name in names[:num_nodes]
        }
        self._decoders = {
            name: Decoder(hardware, self._agenda, self._feeds[name]) for name in names[num_nodes:]
        }
        self._served: dict[int, Served] = {}
        self._num_left = 0

    def run(self, requests: Sequence[Request]) -> list[Served]:
        """All requests to their ends, in their order."""
        self._num_left = len(requests)
        for number, request in enumerate(requests):
            self._agenda.after(request.at, partial(self._arrive, number, request))
        self._agenda.after(0.0, self._poll)
        self._agenda.run()
        return [self._served[number] for number in range(len(requests))]

    @property
    def num_repairs(self) -> int:
        """Gaps in the events of all nodes."""
        return sum(feed.num_repairs for feed in self._feeds.values())

    def _poll(self) -> None:
        for name, node in self._prefillers.items():
            self._known[name].hear(
                num_requests=node.num_requests, num_waiting_tokens=node.num_waiting_tokens
            )
        if self._num_left:
            self._agenda.after(POLL_S, self._poll)

    def _arrive(self, number: int, request: Request) -> None:
        prompt, (prefill, decode) = DigestedPrompt(request), self._views()
        start = perf_counter()
        prompt.hits = self._index.hits(prompt)
        prompt.hits = self._in_flight.hits(prompt)
        route = self._policy.choose(prompt, prefill, decode)
        decision_us = 1e6 * (perf_counter() - start)
        assert route.prefill is not None
        p, d = route.prefill.name, route.decode.name
        on_p, on_d = ExitStack(), ExitStack()
        on_p.enter_context(self._known[p].carrying(prompt.num_tokens - prompt.hit(p).resumable))
        on_p.enter_context(self._in_flight.expecting(prompt, p, self._events))
        on_d.enter_context(self._known[d].carrying(0))
        on_d.enter_context(self._in_flight.expecting(prompt, d, self._events))

        def prefilled(hit: int) -> None:
            on_p.close()

            def first_token() -> None:
                ttft_s = self._agenda.now - request.at
                self._served[number] = Served(ttft_s, prompt.num_tokens, hit, p, decision_us)
                self._num_left -= 1

            self._decoders[d].submit(request, first_token, on_d.close)

        self._prefillers[p].submit(request, prefilled)

    def _views(self) -> tuple[list[NodeView], list[NodeView]]:
        prefill = [self._known[name].view() for name in self._prefillers]
        return prefill, [self._known[name].view() for name in self._decoders]
