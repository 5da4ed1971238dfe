"""Request types that ignore unknown keys, made of those that refuse them, and the warnings."""

from collections.abc import Iterable
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

import msgspec
import structlog

MAX_WARNINGS: Final = 256
MAX_KEY_CHARS: Final = 80

log = structlog.get_logger()


@cache
def lenient(kind: Any) -> Any:
    """`kind` with every struct in it, however deep, replaced by a subclass that skips unknown keys.

    The decoder steps over the values of such keys and builds nothing of them.
    """
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, map(lenient, get_args(kind)))
    if get_origin(kind) is Annotated:
        inner, *bounds = get_args(kind)
        return Annotated[lenient(inner), *bounds]
    if get_origin(kind) is list:
        return list[lenient(get_args(kind)[0])]  # type: ignore[misc]
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return _lenient_struct(kind) if is_struct else kind


def _lenient_struct(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    changed: list[Any] = []
    for field in msgspec.structs.fields(kind):
        if (type_ := lenient(field.type)) is not field.type:
            default: Any = msgspec.field(default=field.default)
            if field.default_factory is not msgspec.NODEFAULT:
                default = msgspec.field(default_factory=field.default_factory)
            changed.append((field.name, type_, default))
    return msgspec.defstruct(
        kind.__name__,
        changed,
        bases=(kind,),
        forbid_unknown_fields=False,
        namespace={"__doc__": kind.__doc__},
        frozen=True,
        kw_only=True,
        tag=kind.__struct_config__.tag,
    )


class UnknownKeyWarnings:
    """Logs each key once, and no more than `MAX_WARNINGS` of them: clients choose the names."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def warn(self, keys: Iterable[str]) -> None:
        """Log the keys that have not been logged yet; called from several threads."""
        for key in keys:
            # Escaped: a name may hold what terminals obey.
            shown = key[:MAX_KEY_CHARS].encode("unicode_escape").decode()
            if shown in self._known or len(self._known) >= MAX_WARNINGS:
                continue
            self._known.add(shown)
            log.warning("an unknown key of a request is ignored", key=shown)


warnings: Final = UnknownKeyWarnings()
"""Of the process: however many apps serve, one line per key."""
