"""The demo's conversation with the cluster: real OpenAI requests through the proxy, and a table.

Knows only a client of the proxy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SYSTEM = {"role": "system", "content": "You answer from what you are told."}
STORY = "One morning, Mia went to the school."
CHAT = "Anna has a kite. Ben has a lamp. What does Ben have?"
TURNS = (
    "Leo has a drum. Iris has a coin. Sam has a map. What does Iris have?",
    "Who has the map?",
    "Please list these things in reverse order: ball, key, hat.",
)
OPTIONS: dict[str, Any] = {
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "extra_body": {"return_token_ids": True},
}
COLUMNS = (
    "prompt\ntokens",
    "hit\non P",
    "hit\non D",
    "attention\nbytes",
    "state\nbytes",
    "transfer\nms",
    "TTFT\nms",
    "ITL\nms",
)
CHOICE_COLUMNS = ("expected\non P", "hit\non P", "expected\non D", "hit\non D")


@dataclass(slots=True)
class Exchange:
    """One request and what came back; times in milliseconds."""

    name: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: Any = None
    ttft_ms: float = 0.0
    itl_ms: float = 0.0


class Talk:
    """Sends the demo's requests one after the other and shows tokens as they come."""

    def __init__(self, client: "AsyncOpenAI", model: str, console: Console) -> None:
        self._client = client
        self._model = model
        self._console = console

    async def run(self) -> list[Exchange]:
        """A completion, a chat, a conversation of three turns; chats share the system prompt."""
        self._show("prompt", STORY)
        sent = self._client.completions.create(
            model=self._model, prompt=STORY, max_tokens=48, **OPTIONS
        )
        exchanges = [await self._follow("completion", sent)]
        exchanges.append(await self._chat("chat", [SYSTEM], CHAT))
        messages = [SYSTEM]
        for number, question in enumerate(TURNS, start=1):
            exchanges.append(await self._chat(f"turn {number} of 3", messages, question))
        return exchanges

    async def _chat(self, name: str, messages: list[Any], question: str) -> Exchange:
        """Adds the question and its answer to `messages`."""
        self._show("you", question)
        messages += [{"role": "user", "content": question}]
        sent = self._client.chat.completions.create(
            model=self._model, messages=messages, max_tokens=32, **OPTIONS
        )
        exchange = await self._follow(name, sent)
        messages += [{"role": "assistant", "content": exchange.text}]
        return exchange

    def _show(self, who: str, text: str) -> None:
        self._console.print(f"[bold]{who}:[/] {text}", highlight=False)

    async def _follow(self, name: str, sent: Any) -> Exchange:
        exchange = Exchange(name)
        arrivals = [perf_counter()]
        self._console.print(f"[cyan]{name}:[/] ", end="")
        async for chunk in await sent:
            exchange.usage = chunk.usage or exchange.usage
            for choice in chunk.choices:
                arrivals.append(perf_counter())
                piece = choice.text if "text" in choice.model_fields else choice.delta.content
                exchange.text += piece or ""
                exchange.token_ids += (choice.model_extra or {}).get("token_ids") or []
                self._console.print(piece or "", end="", highlight=False, markup=False)
        self._console.print()
        exchange.ttft_ms = 1e3 * (arrivals[1] - arrivals[0])
        exchange.itl_ms = 1e3 * (arrivals[-1] - arrivals[1]) / max(1, len(arrivals) - 2)
        return exchange


def table_of(exchanges: Iterable[Exchange]) -> Table:
    """One row per request; bytes and transfer time are what D reports of its pull."""
    table = _empty_table("What moved from P to D", ("request",), COLUMNS)
    for exchange in exchanges:
        usage, moved = exchange.usage, _extra(exchange, "kv_transfer")
        table.add_row(
            exchange.name,
            str(usage.prompt_tokens),
            str(moved.get("prefill_cached_tokens", 0)),
            str(moved.get("decode_cached_tokens", 0)),
            f"{moved.get('attention_bytes', 0):,}",
            f"{moved.get('state_bytes', 0):,}",
            f"{moved.get('transfer_ms', 0.0):.1f}",
            f"{exchange.ttft_ms:.1f}",
            f"{exchange.itl_ms:.2f}",
        )
    return table


def choices_of(exchanges: Iterable[Exchange], names: Mapping[str, str]) -> Table:
    """One row per request: its nodes, why, and the cached tokens that the router counted on.

    `names`: the nodes' own, by URL.
    """
    table = _empty_table("What the router chose", ("request", "P", "D", "reason"), CHOICE_COLUMNS)
    for exchange in exchanges:
        choice, moved = _extra(exchange, "routing"), _extra(exchange, "kv_transfer")
        table.add_row(
            exchange.name,
            *(names.get(choice.get(kind) or "", "-") for kind in ("prefill", "decode")),
            choice.get("reason", "-"),
            str(choice.get("prefill_hit_tokens", 0)),
            str(moved.get("prefill_cached_tokens", "-")),
            str(choice.get("decode_hit_tokens", 0)),
            str(moved.get("decode_cached_tokens", "-")),
        )
    return table


def _empty_table(title: str, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in texts:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _extra(exchange: Exchange, name: str) -> dict[str, Any]:
    """A field that Tandem adds to OpenAI's `usage`."""
    return (exchange.usage.model_extra or {}).get(name) or {}
