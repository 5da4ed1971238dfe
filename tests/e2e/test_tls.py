"""A cluster over TLS: every HTTP and gRPC connection is encrypted, and to the right server."""

import asyncio
import ssl
from pathlib import Path

import aiohttp
import openai
import pytest
import trustme

from connector.pd.wire.control_client import ControlClient
from engine.errors import ConfigError, UnavailableError
from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from serving.config import load_config
from serving.rpc.client import NodeClient
from serving.tls import client_tls, server_tls
from tests.support.nodes.cluster import Cluster, transfer_config, until
from tests.support.nodes.forks import Command, run_command
from tests.support.nodes.pairs import prompt_of

TOKEN = "secret of the cluster"
PROMPT = list(prompt_of(90))
S = 10.0


class Files:
    """Files of an operator for one authority: its certificate, and a server's with its key."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        authority = trustme.CA()
        server = authority.issue_cert("127.0.0.1", "localhost")
        self.ca, self.cert, self.key = (str(folder / name) for name in ("ca", "cert", "key"))
        authority.cert_pem.write_to_path(self.ca)
        server.private_key_pem.write_to_path(self.key)
        for number, blob in enumerate(server.cert_chain_pems):
            blob.write_to_path(self.cert, append=number > 0)

    @property
    def flags(self) -> dict[str, str]:
        """For nodes and proxy."""
        return {"ssl_certfile": self.cert, "ssl_keyfile": self.key, "ssl_ca_certs": self.ca}


@pytest.fixture
def ours(tmp_path: Path) -> Files:
    return Files(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Files:
    return Files(tmp_path / "theirs")


async def test_a_hand_over_through_the_proxy_over_tls(
    cluster: Cluster, model: Path, tmp_path: Path, *, ours: Files, theirs: Files
) -> None:
    p, d = await cluster.pair(
        model,
        kv_transfer_config=transfer_config("zmq"),
        cluster_token=TOKEN,
        ssl_certfile=ours.cert,
        ssl_keyfile=ours.key,
        ssl_ca_certs=ours.ca,
    )
    nodes = {"prefill": (p.url,), "decode": (d.url,), "port": 0, "cluster_token": TOKEN}
    nodes["enable_prompt_tokens_details"] = True
    proxy = ProxyServer(
        load_config(ProxyConfig, None, {**nodes, **ours.flags, "drain_timeout": 0.5})
    )
    stranger = ProxyServer(load_config(ProxyConfig, None, {**nodes, "ssl_ca_certs": theirs.ca}))
    await proxy.start()
    await stranger.start()
    try:
        assert {url.partition(":")[0] for url in (p.url, d.url, proxy.url)} == {"https"}
        await until_ready(proxy.url, ours)
        await until(lambda: all(node.is_available for node in proxy._pool.nodes))
        trusted = openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=ours.ca))
        async with openai.AsyncOpenAI(
            base_url=f"{proxy.url}/v1", api_key="none", max_retries=0, http_client=trusted
        ) as client:
            reply = await client.completions.create(
                model=str(model), prompt=PROMPT, max_tokens=5, extra_body={"ignore_eos": True}
            )
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 5
        moved = (reply.usage.model_extra or {})["kv_transfer"]
        assert moved["attention_bytes"] > 0
        assert moved["verified"]
        await nobody_else_is_trusted(p.rpc.port, theirs)
        refused = "certificate verify failed"
        await until(lambda: all(refused in str(node.problem) for node in stranger._pool.nodes))
        told = await asyncio.to_thread(doctor, p.url, d.url, ours, tmp_path)
        assert told.returncode == 0, told.stdout
    finally:
        await stranger.close()
        await proxy.close()


async def until_ready(url: str, files: Files) -> None:
    context = ssl.create_default_context(cafile=files.ca)
    async with asyncio.timeout(20), aiohttp.ClientSession(url) as http:
        while True:
            async with http.get("/ready", ssl=context) as ready:
                if ready.status == 200:
                    return
            await asyncio.sleep(0.05)


async def nobody_else_is_trusted(port: int, theirs: Files) -> None:
    """Neither without TLS nor under another authority."""
    tls = client_tls(theirs.ca)
    for trusted in (None, tls):
        client = NodeClient(f"127.0.0.1:{port}", token=TOKEN, tls=trusted)
        with pytest.raises(UnavailableError, match=str(port)):
            await client.describe(S)
        await client.close()
    address = f"127.0.0.1:{port}"
    caller = ControlClient(address, token=TOKEN, caller_engine_id="d", timeout_s=S, tls=tls)
    async with caller as control:
        with pytest.raises(UnavailableError, match=str(port)):
            await control.handshake()


def doctor(p: str, d: str, files: Files, folder: Path) -> Command:
    flags = "--cluster-token", TOKEN, "--ssl-ca-certs", files.ca
    return run_command(folder, "connector.doctor", p, d, *flags)


def test_files_that_are_no_good_are_refused_by_name(
    ours: Files, theirs: Files, tmp_path: Path
) -> None:
    garbage, absent = tmp_path / "garbage", str(tmp_path / "absent")
    garbage.write_text("no certificate")
    for cert, key, told in (
        (ours.cert, None, "both --ssl-certfile and --ssl-keyfile"),
        (None, ours.key, "both --ssl-certfile and --ssl-keyfile"),
        (absent, ours.key, "--ssl-certfile .*absent: No such file"),
        (ours.cert, absent, "--ssl-keyfile .*absent: No such file"),
        (str(garbage), ours.key, "garbage .* must be a certificate"),
        (ours.cert, theirs.key, "KEY_VALUES_MISMATCH"),
    ):
        with pytest.raises(ConfigError, match=told):
            server_tls(cert, key)
    for ca, told in ((absent, "absent: No such file"), (str(garbage), "must hold PEM")):
        with pytest.raises(ConfigError, match=f"--ssl-ca-certs .*{told}"):
            client_tls(ca)


def test_a_missing_file_ends_the_start_with_one_line(ours: Files, tmp_path: Path) -> None:
    flags = "--ssl-certfile", ours.cert, "--ssl-keyfile", "absent"
    done = run_command(tmp_path, "proxy", "--decode", "https://127.0.0.1:1", *flags)
    assert done.returncode == 2
    assert done.stderr == "error: --ssl-keyfile absent: No such file or directory\n"
