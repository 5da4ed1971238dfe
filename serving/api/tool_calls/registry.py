"""Ways of writing tool calls by the names of vLLM's parsers, and the choice by a chat template."""

from collections.abc import Mapping
from typing import Final

from serving.api.tool_calls.json_calls import JsonCalls
from serving.api.tool_calls.syntax import ToolCallSyntax
from serving.api.tool_calls.xml_calls import XmlCalls
from serving.config import ToolCallParser

_HERMES = JsonCalls("<tool_call>", "</tool_call>")
_XML = XmlCalls()

SYNTAXES: Final[Mapping[ToolCallParser, ToolCallSyntax | None]] = {
    "none": None,
    "hermes": _HERMES,
    "granite4": _HERMES,
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
    "nemotron_json": JsonCalls("<TOOLCALL>", "</TOOLCALL>"),
}


def choose_syntax(name: ToolCallParser, template: str | None) -> ToolCallSyntax | None:
    """The syntax of that name; with `auto` the one that the model's chat template writes.

    The template tells more than the model's type: Qwen3 and Qwen3-Coder share one type and write
    calls differently. None reads no calls.
    """
    if name != "auto":
        return SYNTAXES[name]
    text = template or ""
    if "<TOOLCALL>" in text:
        return SYNTAXES["nemotron_json"]
    if "<tool_call>" not in text:
        return None
    return SYNTAXES["qwen3_coder" if "<function=" in text else "hermes"]
