"""The attributes of uvicorn that `serving.http` uses, by name: a release that moves one fails here.

uvicorn promises none of them, so pyproject.toml bounds its version.
"""

import ast
import inspect
from typing import Any, Final

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl

from serving.http import connection, server
from tests.source_tree import parsed

OF_PROTOCOL: Final = {
    *("cycle", "flow", "loop", "parser", "pipeline", "scheme", "timeout_keep_alive"),
    *("transport", "connection_made", "connection_lost", "eof_received", "pause_writing"),
    *("resume_writing", "data_received", "on_message_begin", "on_header", "on_headers_complete"),
    *("on_body", "on_message_complete", "on_response_complete", "_unset_keepalive_if_required"),
}
OF_CYCLE: Final = {
    *("chunked_encoding", "disconnected", "keep_alive", "message_event", "response_complete"),
    *("response_started", "scope", "transport", "waiting_for_100_continue"),
}
OF_SERVER: Final = {
    *("config", "server_state", "startup", "shutdown", "on_tick", "capture_signals"),
}
USED: Final = {
    "self": (connection.Connection, httptools_impl.HttpToolsProtocol, OF_PROTOCOL),
    "self.cycle": (connection.Connection, httptools_impl.RequestResponseCycle, OF_CYCLE),
    "the server": (server._Server, uvicorn.Server, OF_SERVER),
}


def attributes(kind: type[Any], owner: str) -> set[str]:
    """The methods of `kind`, and the attributes of `owner` that its own source names."""
    tree = parsed(inspect.getsource(kind))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    named = {node.attr for node in found if ast.unparse(node.value) == owner}
    return named | (set(vars(kind)) if owner == "self" else set())


@pytest.mark.parametrize("what", USED)
def test_uvicorn_has_all_that_is_used_of_it_and_no_more_is_used(what: str) -> None:
    ours, theirs, names = USED[what]
    owner = "self.cycle" if what == "self.cycle" else "self"
    has = set(dir(theirs)) | attributes(theirs, "self")
    assert attributes(ours, owner) & has - set(dir(object)) - {"__module__"} == names


def test_an_overridden_method_takes_as_much_as_uvicorns() -> None:
    for ours, theirs, names in USED.values():
        for name in names & set(vars(ours)) & set(vars(theirs)):
            mine, base = (inspect.signature(getattr(kind, name)) for kind in (ours, theirs))
            assert len(mine.parameters) == len(base.parameters), name


def test_uvicorn_has_a_status_line_for_what_is_refused() -> None:
    assert httptools_impl.STATUS_LINE[408].startswith(b"HTTP/1.1 408 ")
