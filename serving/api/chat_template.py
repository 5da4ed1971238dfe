"""Renders a model's own chat template, bounded in time and size. Knows nothing of tokens.

Templates come with the model, never from a client; the bounds stop runaway ones.
"""

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from engine.errors import CheckpointError, ConfigError, InvalidRequestError
from engine.model_files import read_object, read_text
from serving.config import ContentFormat

MAX_RENDERED_CHARS = 33_554_432
MAX_RENDER_S = 2.0
_MAX_BITS = 4096

# These fill up to a width that the template names; templates of models do without.
_WIDE_FILTERS = ("batch", "center", "format", "slice", "wordwrap")
_WIDE_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_WIDE_FORMAT = re.compile(r"\d{5}|\*|:[^}]*\{")

_TEMPLATE_FAULTS = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError),
    *(MemoryError, RecursionError, TypeError, ValueError),
)


class _LimitError(jinja2.TemplateError):
    """The template ran too long or wrote too much."""


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here it only stands for its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Checks(NodeTransformer):
    """Puts checks into the syntax tree, where a template can neither see nor replace them.

    A loop or macro that writes nothing gives the renderer no other chance to look at the clock, and
    Jinja's sandbox does not intercept `~`.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(_call("check_time", [], node.lineno)))
        return self.generic_visit(node)

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


def _call(name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=lineno)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose loops, macros and growing operators look at the limits."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    deadline: float = 0.0
    max_chars: int = MAX_RENDERED_CHARS
    max_seconds: float = MAX_RENDER_S

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Checks().visit(tree)
        tree.set_environment(self)
        return tree

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            seconds = f"{self.max_seconds:g} s"
            raise _LimitError(f"it runs too long, more than {seconds}: send fewer messages")

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise _LimitError(f"it grows beyond {self.max_chars} characters")

    def check_format(self, layout: object) -> None:
        if isinstance(layout, str) and _WIDE_FORMAT.search(layout):
            raise _LimitError(f"its format {layout[:40]!r} has a wide or a computed width")

    def joined(self, *parts: object) -> str:
        texts = [str(part) for part in parts]
        self.check_size(sum(map(len, texts)))
        return "".join(texts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_wide = isinstance(obj, str) and attr in _WIDE_METHODS
        return not is_wide and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            self.check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = [it for it in (left, right) if isinstance(it, int)]
        sequences = [it for it in (left, right) if isinstance(it, str | list | tuple)]
        # Checked before the operation: its result might not fit the memory.
        if operator == "*" and numbers and sequences:
            self.check_size(len(sequences[0]) * numbers[0])
        if operator == "**" and len(numbers) == 2 and left.bit_length() * abs(right) > _MAX_BITS:
            self.check_size(self.max_chars + 1)
        if operator == "%":
            self.check_format(left)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str | list | tuple):
            self.check_size(len(result))
        return result


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    *,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter; the options are transformers'."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


class ChatTemplate:
    """One compiled template; `render` may be called from several threads.

    With `auto` contents are strings, unless only parts come out.

    Raises CheckpointError when the template's text is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        content_format: ContentFormat = "string",
        max_chars: int = MAX_RENDERED_CHARS,
        max_seconds: float = MAX_RENDER_S,
    ) -> None:
        self.source = source
        self._environment = environment = _BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.max_chars, environment.max_seconds = max_chars, max_seconds
        del environment.globals["lipsum"]  # generates text of any length
        for name in _WIDE_FILTERS:
            del environment.filters[name]
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._code = environment.compile(source)
            self.names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise CheckpointError(f"the chat template is not valid Jinja: {error}") from error
        self._takes_parts = content_format == "openai" or (
            content_format == "auto" and self._writes_parts_only()
        )

    def _writes_parts_only(self) -> bool:
        """Tries a message: true where its text comes out as parts, and is lost as a string.

        vLLM looks for loops over contents; trying also tells templates with loops in macros.
        """
        probe = f"PROBE{uuid.uuid4().hex}"

        def writes(content: object) -> bool:
            try:
                turn = {"role": "user", "content": content}
                names = {"messages": [turn], "add_generation_prompt": True, "tools": None}
                return probe in self._write({**self._special_tokens, **names})
            except _TEMPLATE_FAULTS:
                return False

        return not writes(probe) and writes(_as_parts(probe))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation; raises InvalidRequestError when the template fails."""
        names = {
            **self._special_tokens,
            **(extra or {}),
            "messages": self._in_format(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._write(names)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequestError(
                f"the model's chat template refused these messages: {error}", param="messages"
            ) from error

    def render_up_to_last_content(
        self, messages: Sequence[Mapping[str, Any]], *, extra: Mapping[str, Any] | None = None
    ) -> str:
        """Text of a conversation that stops where the last message's content does.

        Raises InvalidRequestError where the template has not written that content.
        """
        content = messages[-1]["content"]
        # As transformers: the content alone may occur in what the template writes after it.
        tag = f"END{uuid.uuid4().hex}"
        last = {**messages[-1], "content": f"{content}{tag} "}
        text = self.render([*messages[:-1], last], add_generation_prompt=False, extra=extra)
        before, found, after = text.rpartition(tag)
        if not found or not content.strip() or content.strip() not in before:
            raise InvalidRequestError(
                "continue_final_message needs a last message with text that the chat template "
                "writes",
                param="continue_final_message",
            )
        # A template that trims has taken the space after the tag, as it would those before it.
        return before if after.startswith(" ") else before.rstrip()

    def _in_format(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        if not self._takes_parts:
            return messages
        return [
            {**it, "content": _as_parts(it["content"])}
            if isinstance(it.get("content"), str)
            else it
            for it in messages
        ]

    def _write(self, names: Mapping[str, Any]) -> str:
        # Each rendering has a deadline of its own: an overlay shares all but its attributes.
        bounded = self._environment.overlay()
        bounded.deadline = time.monotonic() + bounded.max_seconds
        template = jinja2.Template.from_code(bounded, self._code, bounded.make_globals(None))
        parts: list[str] = []
        written = 0
        for part in template.generate(names):
            written += len(part)
            bounded.check_size(written)
            bounded.check_time()
            parts.append(part)
        return "".join(parts)


MAX_TEMPLATE_BYTES: Final = 1 << 20
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
_FILES: Final = (
    (DEFAULT, "chat_template.jinja"),
    (DEFAULT, "additional_chat_templates/default.jinja"),
    (TOOL_USE, "additional_chat_templates/tool_use.jinja"),
)
_OF_JINJA: Final = frozenset("{}\n")


def template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: `default`, and `tool_use` for requests that offer tools.

    As in transformers files of their own go before tokenizer_config.json. chat_template.json, which
    processors have, comes last. Raises CheckpointError for broken files.
    """
    of_files = {
        name: text
        for name, file in _FILES
        if (text := read_text(folder / file, MAX_TEMPLATE_BYTES)) is not None
    }
    if DEFAULT in of_files:
        return of_files
    of_config = _named(config.get("chat_template"))
    processor = read_object(folder / "chat_template.json") or {}
    return _named(processor.get("chat_template")) | of_config | of_files


def compile_templates(
    sources: Mapping[str, str], special_tokens: Mapping[str, str], content_format: ContentFormat
) -> dict[str, ChatTemplate]:
    """The templates that are used; raises CheckpointError for one that is not valid Jinja."""
    return {
        name: ChatTemplate(sources[name], special_tokens, content_format=content_format)
        for name in (DEFAULT, TOOL_USE)
        if name in sources
    }


def given_template(option: str | None) -> str | None:
    """The text that `--chat-template` names: a file's path, or the template itself, as in vLLM.

    Raises ConfigError for a file that cannot be read and for a text that is not valid Jinja.
    """
    if option is None:
        return None
    text = _given_text(option)
    try:
        ChatTemplate(text)
    except CheckpointError as error:
        raise ConfigError(f"--chat-template: {error}") from error
    return text


def _given_text(option: str) -> str:
    try:
        # Not every text can be a path: its names may be too long, or it may hold a NUL.
        may_be_path = "\0" not in option and len(os.fsencode(option)) < 4096
        found = read_text(Path(option), MAX_TEMPLATE_BYTES) if may_be_path else None
    except CheckpointError as error:
        if not _OF_JINJA.intersection(option):
            raise ConfigError(f"--chat-template: {error}") from error
        found = None
    if found is not None:
        return found
    if not _OF_JINJA.intersection(option):
        raise ConfigError(
            f"--chat-template {option[:200]!r} is neither a file nor a template, which has braces"
        )
    if len(option) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"--chat-template is longer than {MAX_TEMPLATE_BYTES} characters")
    try:
        # A shell cannot write the characters that \n and the like stand for.
        return option.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template has a broken escape: {error}") from error


def _named(entry: object) -> dict[str, str]:
    """Named templates of an entry: one text, a list of objects with names, or an object."""
    if isinstance(entry, str):
        return {DEFAULT: entry}
    if isinstance(entry, list):
        pairs = [(it.get("name"), it.get("template")) for it in entry if isinstance(it, dict)]
    else:
        pairs = list(entry.items()) if isinstance(entry, dict) else []
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
