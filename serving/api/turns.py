"""Turns of a chat, made of what other protocols list one by one: thoughts, texts, calls, results.

thoughts, text, call, call | result | result | text of the user
one message of the assistant | tool    | tool   | user
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError
from serving.api.schema import Called, CalledFunction, Message, TextPart

Content = str | list[TextPart]


@dataclass(slots=True)
class Turns:
    """Messages in the making, read from `done` after `end_turn`.

    `whole_history`: what to send, for a client that names a call that it did not send.
    """

    whole_history: str
    done: list[Message] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _content: str | None = None
    _calls: list[Called] = field(default_factory=list)
    _known_calls: set[str] = field(default_factory=set)

    def think(self, thoughts: Iterable[str]) -> None:
        """Add thoughts of the assistant; they begin a turn."""
        self._next_step()
        self._thoughts += thoughts

    def say(self, text: str) -> None:
        """Add the assistant's text."""
        self._next_step()
        self._content = text

    def call(self, name: str, arguments: str, call_id: str) -> None:
        """Add a call of a tool; `arguments` is JSON."""
        function = CalledFunction.of(name, arguments)
        self._calls.append(Called(function=function, id=call_id))
        self._known_calls.add(call_id)

    def result(self, path: str, call_id: str, content: Content) -> None:
        """Add what a call returned; raises InvalidRequestError at `path` for an unknown call."""
        self.end_turn()
        # A result without its call: the client left out turns that it thinks are stored.
        if call_id not in self._known_calls:
            raise InvalidRequestError(
                f"{path}={call_id!r}: no call before it has this id; {self.whole_history}",
                param=path,
            )
        self.done.append(Message(role="tool", content=content, tool_call_id=call_id))

    def add(self, message: Message) -> None:
        """Add a turn of somebody else."""
        self.end_turn()
        self.done.append(message)

    def end_turn(self) -> None:
        """Close the assistant's turn, if one is open."""
        if self._content is not None or self._calls or self._thoughts:
            self.done.append(
                Message(
                    role="assistant",
                    content=self._content or "",
                    reasoning_content="\n".join(self._thoughts) or None,
                    tool_calls=self._calls or None,
                )
            )
        self._thoughts, self._content, self._calls = [], None, []

    def _next_step(self) -> None:
        """End the turn before thoughts or text that cannot belong to it."""
        # One turn of a template: thoughts, then text, then calls.
        if self._content is not None or self._calls:
            self.end_turn()
