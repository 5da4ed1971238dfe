"""The OpenAPI document as one HTML page that needs nothing else: no script and no other host."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
code, summary { font-family: ui-monospace, monospace }
table { border-collapse: collapse; margin: 0.5rem 0 1rem; width: 100% }
td { border-top: 1px solid #8884; padding: 0.2rem 0.5rem; vertical-align: top }
:root { color-scheme: light dark }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """HTML of a document that `serving.api.openapi` made."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    return "".join(
        (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
            '<p>For programs: <a href="openapi.json">openapi.json</a></p><h2>Paths</h2>',
            *_paths(document["paths"]),
            "<h2>Types</h2>",
            *_types(document["components"]["schemas"]),
            "</body></html>",
        )
    )


def _paths(paths: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            key = " (needs a key)" if operation["security"] else ""
            name = escape(f"{method.upper()} {path}")
            yield f"<h3><code>{name}</code></h3><p>{escape(operation['summary'])}{key}</p>"
            yield from _contents("Body", operation.get("requestBody", {}))
            yield from _contents("Reply", operation["responses"]["200"])


def _contents(label: str, message: Mapping[str, Any]) -> Iterator[str]:
    for media, one in message.get("content", {}).items():
        kind = _kind(one["schema"]) if "schema" in one else ""
        yield f"<p>{label}: {escape(media)} {kind}</p>"


def _types(schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        yield f'<details id="{escape(name)}" open><summary>{escape(name)}</summary>'
        yield f"<p>{escape(schema.get('description', ''))}</p><table>"
        required = schema.get("required", ())
        for key, one in schema.get("properties", {}).items():
            mark = " (required)" if key in required else ""
            yield f"<tr><td><code>{escape(key)}</code>{mark}</td><td>{_kind(one)}</td></tr>"
        yield "</table></details>"


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in words; types of their own are links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return escape(" or ".join(map(repr, schema["enum"])))
    bounds = {key: it for key, it in schema.items() if key.startswith(("min", "max", "exclusive"))}
    words = [escape(str(schema.get("type", "anything")))]
    words += [escape(f"{key} {it}") for key, it in bounds.items()]
    inner = schema.get("items") or schema.get("additionalProperties")
    if isinstance(inner, Mapping):
        words.append(f"of ({_kind(inner)})")
    return " ".join(words)
