"""What the demo says to the cluster and what it shows: real OpenAI requests through the proxy.

Knows only the proxy's URL.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

SYSTEM = "You answer from what you are told."
STORY = "One morning, Mia went to the school."
TURNS = (
    "Leo has a drum. Iris has a coin. Sam has a map. What does Iris have?",
    "What does Sam have?",
    "Please list these things in reverse order: ball, key, hat.",
)
GREEDY: dict[str, Any] = {"temperature": 0, "stream": True}
EXTRA = {"return_token_ids": True}
OPTIONS = {"include_usage": True}


@dataclass(slots=True)
class Exchange:
    """One request and what came back; times in milliseconds."""

    name: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: Any = None
    ttft_ms: float = 0.0
    itl_ms: float = 0.0


async def run_exchanges(client: AsyncOpenAI, model: str, console: Console) -> list[Exchange]:
    """A streamed completion, then a conversation of three turns with a shared system prompt."""
    story = await client.completions.create(
        model=model,
        prompt=STORY,
        max_tokens=48,
        stream_options=OPTIONS,
        extra_body=EXTRA,
        **GREEDY,
    )
    exchanges = [await _follow("completion", story, console)]
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    for number, question in enumerate(TURNS, start=1):
        messages.append({"role": "user", "content": question})
        console.print(f"[bold]you:[/] {question}")
        chat = await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=32,
            stream_options=OPTIONS,
            extra_body=EXTRA,
            **GREEDY,
        )
        exchanges.append(await _follow(f"chat, turn {number}", chat, console))
        messages.append({"role": "assistant", "content": exchanges[-1].text})
    return exchanges


async def _follow(name: str, stream: Any, console: Console) -> Exchange:
    """Shows tokens as they come."""
    exchange = Exchange(name)
    started = perf_counter()
    arrivals: list[float] = []
    console.print(f"[cyan]{name}:[/] ", end="")
    async for chunk in stream:
        exchange.usage = chunk.usage or exchange.usage
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            console.print(piece or "", end="", highlight=False, markup=False)
            exchange.text += piece or ""
            exchange.token_ids += choice.model_extra.get("token_ids") or []
            arrivals.append(perf_counter())
    console.print()
    exchange.ttft_ms = 1e3 * (arrivals[0] - started)
    exchange.itl_ms = 1e3 * (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)
    return exchange


def table_of(exchanges: Iterable[Exchange]) -> Table:
    """One row per request; bytes and milliseconds are what D reports of its pull."""
    table = Table(title="What moved")
    columns = ("request", "prompt", "hit P", "hit D", "attention B", "state B")
    for column in (*columns, "transfer ms", "TTFT ms", "ITL ms"):
        table.add_column(column, justify="left" if column == "request" else "right")
    for exchange in exchanges:
        table.add_row(exchange.name, *_cells(exchange))
    return table


def _cells(exchange: Exchange) -> list[str]:
    usage = exchange.usage
    moved = (usage.model_extra or {}).get("kv_transfer") or {}
    return [
        str(usage.prompt_tokens),
        str(moved.get("prefill_cached_tokens", 0)),
        str(moved.get("decode_cached_tokens", 0)),
        f"{moved.get('attention_bytes', 0):,}",
        f"{moved.get('state_bytes', 0):,}",
        f"{moved.get('transfer_ms', 0.0):.1f}",
        f"{exchange.ttft_ms:.1f}",
        f"{exchange.itl_ms:.2f}",
    ]
