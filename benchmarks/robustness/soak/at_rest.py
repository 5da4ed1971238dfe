"""Resources of servers after their last request, beside those that they held once warm."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from benchmarks.robustness.soak.cluster import FOLDER_BYTES, Cluster, Member
from benchmarks.robustness.soak.watch import Holdings, holdings

WARM_REQUESTS: Final = 40
"""Finished requests after which a life is warm: libraries, tables and caches have their size."""
FINISHED: Final = "vllm:request_success_total{"
MUST_BE_ZERO: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "tandem:held_lease_bytes",
    "tandem:grammar_sequences",
)
ANSWER: Final = aiohttp.ClientTimeout(total=5.0)


@dataclass(slots=True)
class Baselines:
    """Resources that each life of a server held once it had finished `num_requests`.

    A younger life is still growing into its libraries, so it is not judged.
    """

    num_requests: int = WARM_REQUESTS
    taken: dict[tuple[str, int], Holdings] = field(default_factory=dict)

    async def take(self, members: list[Member]) -> None:
        """Takes the baselines of lives that are warm by now and have none yet."""
        for member in members:
            life = (member.name, member.lives)
            if life in self.taken or not member.is_up:
                continue
            finished = sum(await values(member.url, FINISHED))
            held = holdings(member)
            # Another life may have begun meanwhile, with another process.
            is_same = member.is_up and life == (member.name, member.lives)
            if finished >= self.num_requests and held is not None and is_same:
                self.taken[life] = held

    def judged(self, members: list[Member]) -> list[Member]:
        """Members whose present life has a baseline."""
        return [each for each in members if (each.name, each.lives) in self.taken]

    def excess(self, member: Member) -> str:
        """Resources that a judged member's present life holds beyond its baseline, in words."""
        now = holdings(member)
        return "" if now is None else now.excess(self.taken[member.name, member.lives])


async def left(up: Cluster, baselines: Baselines) -> list[str]:
    """Lists, in words, all that members hold and should not hold at rest."""
    found = []
    for member in baselines.judged(up.members):
        if excess := baselines.excess(member):
            found.append(f"{member.name} holds {excess} beyond its first requests")
    for member in up.members:
        for name in MUST_BE_ZERO:
            if number := sum(await values(member.url, name)):
                found.append(f"{member.name}: {name} is {number:g}")
    return found + await asyncio.to_thread(_files, up)


def _files(up: Cluster) -> list[str]:
    """Files that kills left in the folder of the tier, and its size if beyond the bound."""
    files = [file for file in up.folder.rglob("*") if file.is_file()]
    found = [f"{file.name} is in the folder of the tier" for file in files if is_partial(file)]
    if (size := sum(file.stat().st_size for file in files)) > FOLDER_BYTES:
        found.append(f"the folder of the tier has {size} bytes, and may have {FOLDER_BYTES}")
    return found


def is_partial(file: Path) -> bool:
    """A file that was being written when its node was killed, and that nobody has removed."""
    return file.suffix == ".tmp"


def unjudged(up: Cluster, baselines: Baselines) -> list[str]:
    """Words for a run that could not have found a leak: of the proxy, or of any node."""
    judged = baselines.judged(up.members)
    found = []
    if up.proxy not in judged:
        found.append("the proxy finished too few requests to be judged for leaks")
    if not any(node in judged for node in up.nodes):
        found.append("every node's life finished too few requests to be judged for leaks")
    return found


async def values(url: str, start: str) -> list[float]:
    """Values of the metrics whose lines begin with `start`; none of a server that is away."""
    try:
        async with (
            aiohttp.ClientSession(url, timeout=ANSWER) as http,
            http.get("/metrics") as reply,
        ):
            lines = (await reply.text()).splitlines()
    except (aiohttp.ClientError, TimeoutError):
        return []
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(start)]
