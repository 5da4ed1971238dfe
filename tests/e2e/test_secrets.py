"""A secret that is missing, empty or garbled opens no door."""

import asyncio
from pathlib import Path

from connector.pd.wire.control_client import ControlClient
from engine.errors import AuthenticationError, TandemError, UnprovenPeerError
from engine.types import GenerateRequest
from serving.rpc.client import NodeClient, StreamDeadlines
from tests.support.nodes.asking import ask, get, question
from tests.support.nodes.forks import run_command
from tests.support.nodes.processes import API_KEY, Launcher

S = 10.0
REQUEST = GenerateRequest(request_id="r", prompt_token_ids=(5, 6, 7))


async def test_an_api_key_without_a_cluster_token_closes_the_grpc_port(real: Launcher) -> None:
    """Not even a loopback caller gets around the key; who has it is served."""
    node = await asyncio.to_thread(real.node, "decode_node", "--api-key", API_KEY)
    assert "no cluster token, and it has an API key" in node.said
    assert "TANDEM_CLUSTER_TOKEN" in node.said
    answer = await ask(node.url, question([5, 6, 7], max_tokens=4))
    assert len(answer.token_ids) == 4
    port = (await get(node.url, "/node_info", key=None)).body["grpc_port"]
    for token, refusal in ((None, AuthenticationError), ("guess", UnprovenPeerError)):
        for error in await refusals(f"127.0.0.1:{port}", token):
            assert type(error) is refusal
            assert "TANDEM_CLUSTER_TOKEN" in str(error)


async def refusals(address: str, token: str | None) -> list[BaseException]:
    """Errors that a stranger gets from every method that says or does something."""
    client = NodeClient(address, token=token)
    stranger = ControlClient(address, token=token, caller_engine_id="stranger", timeout_s=S)
    async with stranger as control:
        answers = await asyncio.gather(
            anext(client.generate(REQUEST, StreamDeadlines())),
            client.describe(S),
            client.get_tokenizer(S),
            client.release("e", "r", reason="done", timeout_s=S),
            control.handshake(),
            control.claim("e", "r"),
            return_exceptions=True,
        )
    await client.close()
    assert all(isinstance(answer, TandemError) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, BaseException)]


NODE = ("decode_node", "no-such-model")
PROXY = ("proxy", "--decode", "http://127.0.0.1:1", "--port", "0")
WRONG = [
    (NODE, {"TANDEM_CLUSTER_TOKEN": ""}, "cluster_token is empty"),
    (PROXY, {"VLLM_API_KEY": ""}, "api_key is empty"),
    (PROXY, {"TANDEM_CLUSTER_TOKEN": "secret\n"}, "cluster_token has line ends"),
]


def test_a_secret_that_is_none_ends_the_start_with_one_line(tmp_path: Path) -> None:
    """As a Kubernetes secret that is not there leaves it, or a file that ends with a line end."""
    for command, environment, told in WRONG:
        done = run_command(tmp_path, *command, environment=environment)
        assert done.returncode == 2, done
        assert told in done.stderr
        assert done.stderr.count("\n") == 1, done
