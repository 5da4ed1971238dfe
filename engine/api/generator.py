"""The one seam below the HTTP surface: what a server must offer to be served.

Knows nothing of HTTP or text.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from engine.types import GenerateOutput, GenerateRequest


class Generator(Protocol):
    """Turns requests into token streams: an engine on a node, or the proxy's router."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """Stream the outputs of one request; the one with a finish reason is the last.

        `aclose()` on the stream cancels the request everywhere. Every wait inside has a deadline of
        the generator's own. Raises TandemError leaves (see `engine.errors`), before or between
        outputs.
        """
        ...

    async def check_health(self) -> None:
        """Return when the process can still serve; raises TandemError when it must be restarted."""
        ...

    async def check_ready(self) -> tuple[str, ...]:
        """Return when traffic is welcome, with what does not work as it should, in words.

        Raises UnavailableError when traffic is not welcome.
        """
        ...
