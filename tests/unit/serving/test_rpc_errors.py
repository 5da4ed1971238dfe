"""An error raised on a node is the same error for the caller, over a real connection."""

import inspect

import grpc
import pytest

from engine import errors
from engine.errors import InvalidRequestError, TandemError
from engine.types import GenerateRequest
from serving.rpc.client import NodeClient, StreamDeadlines
from serving.rpc.status import error_from_status, error_to_detail, status_code
from tests.support.api.node_double import ScriptedNode, running_nodes

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=(1, 2))
CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TandemError)
]
SPECIAL = [
    errors.InvalidRequestError("no", param="top_p", code="too_big"),
    errors.UnknownModelError("no model 'x'", param="model"),
    errors.KVTransferParamsError("expired", code="expired_kv_transfer_params"),
    errors.OverloadedError("full", retry_after_s=7),
    errors.UnavailableError("draining", retry_after_s=9),
    errors.KVLoadError("grüße\nzwei Zeilen"),
]


async def raised_by(error: TandemError) -> TandemError:
    node = ScriptedNode("d", error=error)
    async with running_nodes(node):
        client = NodeClient(f"127.0.0.1:{node.port}", token=None)
        with pytest.raises(TandemError) as caught:
            _ = [output async for output in client.generate(REQUEST, StreamDeadlines())]
        await client.close()
    return caught.value


@pytest.mark.parametrize(
    "error", [*(cls("text of it") for cls in CLASSES), *SPECIAL], ids=lambda error: repr(error)[:40]
)
async def test_every_error_is_raised_again_with_its_fields(error: TandemError) -> None:
    again = await raised_by(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


async def test_a_class_of_a_newer_peer_becomes_its_known_base() -> None:
    class TooTallError(InvalidRequestError):
        pass

    again = await raised_by(TooTallError("too tall", param="height"))
    assert type(again) is InvalidRequestError
    assert again.param == "height"


async def test_a_bug_on_the_node_tells_nothing_of_its_inside() -> None:
    class Broken(ScriptedNode):
        def _outputs(self, request: GenerateRequest) -> list[object]:  # type: ignore[override]
            raise ZeroDivisionError("secret")

    node = Broken("d")
    async with running_nodes(node):
        client = NodeClient(f"127.0.0.1:{node.port}", token=None)
        with pytest.raises(TandemError, match="internal error") as caught:
            await anext(client.generate(REQUEST, StreamDeadlines()))
        await client.close()
    assert "secret" not in str(caught.value)


def test_a_long_message_is_cut() -> None:
    assert len(error_to_detail(TandemError("x" * 100_000)).SerializeToString()) < 3000


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.CANCELLED, errors.UnavailableError),
        (grpc.StatusCode.UNKNOWN, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceededError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ConfigError),
        (grpc.StatusCode.UNAUTHENTICATED, errors.AuthenticationError),
    ],
)
def test_where_grpc_itself_spoke_the_status_decides(
    code: grpc.StatusCode, kind: type[TandemError]
) -> None:
    for metadata in ((), (("tandem-error-bin", b"\xff\xff"),)):
        assert type(error_from_status(code, "text", metadata)) is kind


def test_every_class_has_a_status_of_its_own_entry() -> None:
    assert all(status_code(cls("x")) is not grpc.StatusCode.CANCELLED for cls in CLASSES)
