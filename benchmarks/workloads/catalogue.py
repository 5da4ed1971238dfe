"""G1 to G6 by name: what makes each, and the published statistics that it is made to resemble.

Where a generator does not reach a published figure, the figure stands beside it all the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from benchmarks.workloads.adversarial import adversarial
from benchmarks.workloads.bursts import bursts
from benchmarks.workloads.coding_agent import coding_agent
from benchmarks.workloads.conversation import conversation
from benchmarks.workloads.documents import documents
from benchmarks.workloads.fan_out import fan_out
from benchmarks.workloads.traces import Record

Generator = Callable[[float, int], list[Record]]
"""Scale and seed to records."""


@dataclass(slots=True, frozen=True)
class Workload:
    """One generator; `published`: figures by their names in `figures`, of `source`."""

    title: str
    make: Generator
    source: str = "nothing: every prompt is given by its case"
    published: Mapping[str, float] = field(default_factory=dict)


AZURE = MappingProxyType(
    {
        "requests": 8_819,
        "requests per s": 2.57,
        "input tokens, mean": 2_048,
        "input tokens, p50": 1_469,
        "input tokens, p90": 5_194,
        "input tokens, p99": 7_436,
        "output tokens, mean": 28,
        "output tokens, p50": 13,
        "output tokens, p90": 55,
    }
)
AZURE_CODE = "Azure LLM inference trace 2023, code: lengths and arrivals"
WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "G1": Workload(
            "conversations",
            conversation,
            "Mooncake, conversation trace (FAST'25)",
            {
                "requests": 12_031,
                "requests per s": 3.40,
                "input tokens, mean": 12_035,
                "input tokens, p50": 6_909,
                "input tokens, p90": 27_367,
                "input tokens, p99": 85_401,
                "output tokens, mean": 343,
                "output tokens, p50": 350,
                "output tokens, p90": 597,
                "output tokens, p99": 1_120,
                "ideal hits, % of the tokens": 37.4,
                "new tokens, mean": 7_538,
                "new tokens, p50": 2_470,
                "new tokens, p99": 71_942,
            },
        ),
        "G2": Workload(
            "questions about documents, and chats",
            documents,
            "Mooncake, synthetic trace (FAST'25); G2 has more to share, and more chats",
            {
                "requests": 3_993,
                "requests per s": 3.9,
                "input tokens, mean": 15_325,
                "input tokens, p50": 11_587,
                "input tokens, p90": 38_615,
                "input tokens, p99": 66_458,
                "output tokens, mean": 149,
                "output tokens, p50": 69,
                "ideal hits, % of the tokens": 65.1,
                "new tokens, mean": 5_345,
                "new tokens, p50": 374,
            },
        ),
        "G3": Workload(
            "coding agents",
            coding_agent,
            "TraceLab, steps of coding agents; its hits lack what expires in idle gaps",
            {
                "input tokens, mean": 153_700,
                "input tokens, p50": 116_000,
                "input tokens, p90": 240_000,
                "input tokens, p99": 800_000,
                "output tokens, mean": 523,
                "output tokens, p50": 215,
                "output tokens, p90": 1_150,
                "output tokens, p99": 5_000,
                "ideal hits, % of the tokens": 95.7,
                "requests per session": 83.7,
            },
        ),
        "G4": Workload(
            "API fan-out",
            fan_out,
            "Alibaba (Qwen Bailian), business API; G4 is its part that shares system prompts",
            {"ideal hits, % of the tokens": 54.0, "reuses within 10 s, %": 80.0},
        ),
        "G5": Workload(
            "bursts, gaps with CV 13",
            bursts,
            AZURE_CODE,
            {**AZURE, "CV of the gaps between arrivals": 13.0},
        ),
        "G5-cv3": Workload("bursts, gaps with CV 3", partial(bursts, cv=3.0), AZURE_CODE, AZURE),
        "G5-cv1": Workload("no bursts: Poisson", partial(bursts, cv=1.0), AZURE_CODE, AZURE),
        "G6": Workload("adversarial", adversarial),
    }
)
# What replays take seconds for.
THINNED: Mapping[str, tuple[Generator, float]] = MappingProxyType(
    {"G1 conversation": (conversation, 0.03), "G2 documents": (documents, 0.1)}
)
