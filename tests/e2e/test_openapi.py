"""Requests made from the published OpenAPI document, to real servers: nothing contradicts it."""

import asyncio
import sys
from pathlib import Path

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
async def test_p_and_d_publish_one_document(served: ServedCluster) -> None:
    """So that one of them is enough below."""
    async with aiohttp.ClientSession() as http:
        documents = []
        for node in (served.p, served.d):
            async with http.get(f"{node.url}/openapi.json") as reply:
                documents.append(await reply.json())
    assert documents[0] == documents[1]


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("server", ["proxy", "d"])
async def test_schemathesis_finds_nothing(
    served: ServedCluster, tmp_path: Path, server: str
) -> None:
    """But that some bodies of the schema are refused, such as prompts that do not fit."""
    url = getattr(served, server).url
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--url", url, "--header", f"Authorization: Bearer {API_KEY}"),
        *("--exclude-checks", "positive_data_acceptance", "--phases", "coverage,fuzzing"),
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
