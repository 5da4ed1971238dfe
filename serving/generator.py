"""The seam between what generates tokens and what serves them, over HTTP or gRPC."""

from collections.abc import AsyncGenerator
from typing import Protocol

from engine.types import GenerateOutput, GenerateRequest


class TokenSource(Protocol):
    """Turns requests into token streams."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """Streams the outputs of one request; the one with a finish reason is the last.

        `aclose()` on the stream cancels the request everywhere. Every wait inside has a deadline of
        the source's own. Raises TandemError leaves (see `engine.errors`), before or between
        outputs.
        """
        ...


class Generator(TokenSource, Protocol):
    """A token source with health probes: the engine of a node, or the proxy's flow."""

    async def check_health(self) -> None:
        """Returns when the process can still serve; raises TandemError when it must restart."""
        ...

    async def check_ready(self) -> tuple[str, ...]:
        """Returns when traffic is welcome, with what does not work as it should, in words.

        Raises UnavailableError when traffic is not welcome.
        """
        ...
