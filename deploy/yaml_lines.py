"""Lines of a YAML file: which one an error is about."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import yaml

from engine.errors import ConfigError

Node = Any  # yaml's, which has no types
SHARED: Final = "config"
"""Options of all members are decoded once more with each group's own, and may be wrong there."""

# msgspec ends its sentences with a path: "..., got `str` - at `$.prefill.replicas`".
_PATH: Final = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"unknown field `(?P<name>[^`]*)`")
_KEYS: Final = re.compile(r"^(?P<keys>[a-z_]+(\.[a-z_]+)*)?: ")


@dataclass(frozen=True)
class YamlLines:
    """A file that holds one mapping: its `fields`, and the tree of nodes that know their lines."""

    file: Path
    fields: dict[Any, Any]
    root: Node

    @classmethod
    def read(cls, file: Path) -> Self:
        """Raises ConfigError naming file and line for what is no YAML, or says a key twice."""
        try:
            text = file.read_text()
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            fields = msgspec.yaml.decode(text, type=dict[Any, Any])
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from error
        except yaml.MarkedYAMLError as error:
            raise ConfigError(f"{file}:{error.problem_mark.line + 1}: {error.problem}") from error
        except (UnicodeError, yaml.YAMLError, msgspec.DecodeError) as error:
            raise ConfigError(f"{file} must hold a mapping in YAML: {error}") from error
        for key in _repeated(root):
            raise ConfigError(f"{file}:{_line(key)}: {key.value}: is there twice")
        return cls(file, fields, root)

    def located(self, error: ConfigError) -> ConfigError:
        """The error with file and line of the key that it begins with, as `a.b: reason`."""
        text = str(error)
        inner = _PATH.search(text)
        start = _KEYS.match(text)
        keys = (start["keys"] or "").split(".") if start else []
        reason = text[start.end() if start else 0 : inner.start() if inner else None]
        # Of a path through lists and free mappings, `[0]` and `[...]` name no key.
        keys += re.split(r"[.\[]", inner["path"]) if inner else []
        keys = [key for key in keys if key and not key.endswith("]")]
        unknown = _UNKNOWN.search(reason)
        line = self._line_of([*keys, unknown["name"]] if unknown else keys)
        return ConfigError(
            ": ".join([f"{self.file}:{line}", *filter(None, [".".join(keys)]), reason])
        )

    def _line_of(self, keys: Sequence[str]) -> int:
        """The line of the last of these keys that the file has; 1 if it has none."""
        found, rest = _walk(self.root, keys)
        if rest and SHARED in keys:
            shared, missing = _walk(self.root, keys[keys.index(SHARED) :])
            found = found if missing else shared
        return _line(found) if found is not None else 1


def _walk(node: Node, keys: Sequence[str]) -> tuple[Node | None, Sequence[str]]:
    """The deepest key on the way, and the keys that are not there."""
    found = None
    for place, key in enumerate(keys):
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        pair = next((pair for pair in pairs if pair[0].value == key), None)
        if pair is None:
            return found, keys[place:]
        found, node = pair
    return found, ()


def _repeated(root: Node) -> Iterator[Node]:
    """Keys that their mapping has already; YAML's readers silently take the last one."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        # An alias leads to the same node again, perhaps to one around it.
        if node is None or id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        yield from (key for place, key in enumerate(keys) if key.value in names[:place])
        waiting += [value for _, value in node.value]


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1
