"""Requests made from the published OpenAPI document, to real servers: nothing contradicts it."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.processes import API_KEY, ServedCluster

LIMIT_S = 500


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("server", ["proxy", "p", "d"])
async def test_schemathesis_finds_nothing(
    served: ServedCluster, tmp_path: Path, server: str
) -> None:
    """But that some bodies of the schema are refused, such as prompts that do not fit."""
    url = getattr(served, server).url
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--url", url, "--header", f"Authorization: Bearer {API_KEY}"),
        *("--exclude-checks", "positive_data_acceptance", "--phases", "coverage,fuzzing"),
        *("--max-examples", "50", "--request-timeout", "60", "--no-color"),
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
    assert process.returncode == 0, output.decode()[-8000:]
