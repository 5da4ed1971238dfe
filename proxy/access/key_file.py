"""The file of API keys, read again when it changes; a broken one changes nothing."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from engine.errors import ConfigError
from proxy.access.api_key import ApiKey, parse_keys

MAX_BYTES: Final = 4 * 2**20

log = structlog.get_logger()


class KeyFile:
    """`read` it at the start; then `watch` gives each new list of keys to `on_change`."""

    def __init__(self, path: Path, poll_s: float) -> None:
        self._path = path
        self._poll_s = poll_s
        self._known = b""

    async def read(self) -> tuple[ApiKey, ...]:
        """Raises ConfigError for a file that cannot be read, or is no list of keys."""
        self._known = await asyncio.to_thread(self._content)
        return await asyncio.to_thread(parse_keys, self._known, str(self._path))

    async def watch(self, on_change: Callable[[tuple[ApiKey, ...]], None]) -> None:
        """Never returns. What changed is used once two looks in a row have found the same.

        So half a file is not used while another process still writes it.
        """
        seen, problem = self._known, ""
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                content = await asyncio.to_thread(self._content)
                is_new = content != self._known and content == seen
                seen = content
                if is_new:
                    keys = await asyncio.to_thread(parse_keys, content, str(self._path))
                    self._known = content
                    on_change(keys)
                    log.info("API keys are read again", num_keys=len(keys))
                if content == self._known:
                    problem = ""
            except ConfigError as error:
                if str(error) != problem:
                    log.error("API keys stay as they were", problem=str(error))
                problem = str(error)

    def _content(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"--api-keys-file {self._path}: {error.strerror}") from error
        if len(content) > MAX_BYTES:
            raise ConfigError(f"--api-keys-file {self._path} is larger than {MAX_BYTES} bytes")
        return content
