"""Requests made from the published OpenAPI document, to real servers: nothing contradicts it."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.nodes.processes import API_KEY, ServedCluster

LIMIT_S = 500
# A body that is too long is refused by its length (413), before anybody knows what else is wrong.
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
"""


@pytest.mark.long
async def test_all_servers_publish_one_document_but_for_what_is_their_own(
    served: ServedCluster,
) -> None:
    """So that D is enough for both nodes below, and the proxy for what all have in common."""
    async with aiohttp.ClientSession() as http:
        documents: list[dict[str, Any]] = []
        for server in served.servers:
            async with http.get(f"{server.url}/openapi.json") as reply:
                documents.append(await reply.json())
    p, d, proxy = documents
    assert p == d
    for document, own in ((d, ("/node_info",)), (proxy, ("/status", "/"))):
        for path in own:
            del document["paths"][path]
        for schema in document["components"]["schemas"].values():
            # A node says what is in them; test_hostile_kv_params.py looks at that.
            schema.get("properties", {}).pop("kv_transfer_params", None)
    assert d == proxy


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    ("server", "phases"), [("proxy", "coverage,fuzzing"), ("d", "fuzzing")], ids=["proxy", "d"]
)
async def test_schemathesis_finds_nothing(
    served: ServedCluster, tmp_path: Path, server: str, phases: str
) -> None:
    """But that some bodies of the schema are refused, such as prompts that do not fit."""
    url = getattr(served, server).url
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--url", url, "--header", f"Authorization: Bearer {API_KEY}"),
        *("--exclude-checks", "positive_data_acceptance", "--phases", phases),
        *("--max-examples", "20", "--request-timeout", "60", "--no-color"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    # A body may have megabytes, and what was wrong with it stands before it.
    said = "\n".join(line[:500] for line in output.decode().splitlines())
    assert process.returncode == 0, said[-8000:]
