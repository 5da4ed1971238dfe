"""Renders a model's own chat template, bounded in time and size. Knows nothing of tokens.

Templates come with the model, never from a client; the bounds stop runaway ones.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, InvalidRequestError

MAX_RENDERED_CHARS = 33_554_432
MAX_RENDER_S = 2.0
_MAX_BITS = 4096

# What fills up to a width that the template names; templates of models do without.
_WIDE_GLOBALS = ("cycler", "joiner", "lipsum")
_WIDE_FILTERS = ("batch", "center", "format", "slice", "wordwrap")
_WIDE_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_WIDE_FORMAT = re.compile(r"\d{5}|\*|:[^}]*\{")

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _LimitError(jinja2.TemplateError):
    """The template ran too long or wrote too much."""


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here it only stands for its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute is Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose loops, macros and growing operators look at the limits.

    The checks are put into the syntax tree, where a template can neither see nor replace them.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    deadline: float = 0.0
    max_chars: int = MAX_RENDERED_CHARS

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        block: Any
        for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            block.body.insert(0, _check_node(block.lineno))
        _replace_concats(tree)
        return tree

    def check_time(self) -> str:
        if time.monotonic() > self.deadline:
            raise _LimitError("it runs too long")
        return ""

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise _LimitError(f"it grows beyond {self.max_chars} characters")

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

    def check_format(self, layout: object) -> None:
        if isinstance(layout, str) and _WIDE_FORMAT.search(layout):
            raise _LimitError(f"its format {layout[:40]!r} has a wide or a computed width")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self.check_size(_product_size(left, right))
        if operator == "%":
            self.check_format(left)
        if operator == "**":
            self.check_size(_power_size(left, right, self.max_chars))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str | list | tuple):
            self.check_size(len(result))
        return result


def _check_node(lineno: int) -> nodes.Node:
    call = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
    return nodes.ExprStmt(call).set_lineno(lineno)


def _replace_concats(node: nodes.Node) -> None:
    """Turn every `a ~ b` below `node` into a call that looks at the size first."""
    for key, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_without_concat(item) for item in value]
        else:
            setattr(node, key, _without_concat(value))


def _without_concat(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concats(value)
    if not isinstance(value, nodes.Concat):
        return value
    joined = nodes.EnvironmentAttribute("joined", lineno=value.lineno)
    return nodes.Call(
        joined, value.nodes, [], None, None, lineno=value.lineno, environment=value.environment
    )


def _product_size(left: Any, right: Any) -> int:
    """Length of `left * right` where one is a text or list, else 0."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int):
            return len(sequence) * max(count, 0)
    return 0


def _power_size(left: Any, right: Any, too_much: int) -> int:
    if not (isinstance(left, int) and isinstance(right, int)):
        return 0
    return too_much + 1 if left.bit_length() * abs(right) > _MAX_BITS else 0


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class ChatTemplate:
    """One compiled template; `render` may be called from several threads.

    Raises CheckpointError when the template's text is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_chars: int = MAX_RENDERED_CHARS,
        max_seconds: float = MAX_RENDER_S,
    ) -> None:
        self._environment = _make_environment(max_chars)
        self._max_seconds = max_seconds
        self._special_tokens = dict(special_tokens or {})
        try:
            self._code = self._environment.compile(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise CheckpointError(f"the chat template is not valid Jinja: {error}") from error

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
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._write(names)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequestError(
                f"the model's chat template refused these messages: {error}", param="messages"
            ) from error

    def _write(self, names: Mapping[str, Any]) -> str:
        bounded = self._environment.overlay()
        bounded.deadline = time.monotonic() + self._max_seconds
        template = jinja2.Template.from_code(bounded, self._code, bounded.make_globals(None))
        parts: list[str] = []
        written = 0
        for part in template.generate(names):
            written += len(part)
            bounded.check_size(written)
            bounded.check_time()
            parts.append(part)
        return "".join(parts)


def _make_environment(max_chars: int) -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.max_chars = max_chars
    for name in _WIDE_GLOBALS:
        del environment.globals[name]
    for name in _WIDE_FILTERS:
        del environment.filters[name]
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
