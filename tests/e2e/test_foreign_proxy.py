"""A plain sequential PD proxy that knows nothing of Tandem: HTTP to real nodes, no more."""

from typing import Any

from tests.support.nodes.asking import REMOTE_DECODE, ask, question, stream, streamed_ids
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import ServedCluster

PROMPT = list(prompt_of(90, salt=5))
PULLS = "vllm:nixl_bytes_transferred_count"


async def test_posting_to_p_and_then_to_d_streams_every_token(served: ServedCluster) -> None:
    """As such proxies do: P gets the client's body with max_tokens 1 and no stream."""
    options: dict[str, Any] = {"min_tokens": 4, "stream_options": {"include_usage": True}}
    body = question(PROMPT, stream=True, **options)
    alone = streamed_ids(await stream(served.d.url, body))
    to_p = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
    params = (await ask(served.p.url, to_p)).body["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    pulls = served.d.metrics()[PULLS]
    events = await stream(served.d.url, {**body, "kv_transfer_params": params})
    assert streamed_ids(events) == alone
    assert len(alone) == 10
    assert events[-1]["usage"]["completion_tokens"] == 10
    assert served.d.metrics()[PULLS] == pulls + 1


async def test_two_requests_with_one_answer_of_p_get_one_pull(served: ServedCluster) -> None:
    """A proxy that retries sends the same object twice: for the second one D computes."""
    to_p = question(PROMPT, max_tokens=1, kv_transfer_params=REMOTE_DECODE)
    params = (await ask(served.p.url, to_p)).body["kv_transfer_params"]
    body = question(PROMPT, kv_transfer_params=params)
    pulls = served.d.metrics()[PULLS]
    first = await ask(served.d.url, body)
    assert len(first.token_ids) == 10
    second = await ask(served.d.url, body)
    assert second.token_ids == first.token_ids
    assert second.body["usage"].get("kv_transfer") is None
    assert served.d.metrics()[PULLS] == pulls + 1
