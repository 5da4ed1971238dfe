"""One sequence that follows a grammar, for the engine: the mask for its next token."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from engine.errors import GrammarError
from engine.types import TokenId

SLOW_MASK_S: Final = 0.02


class MaskNews:
    """Masks that arrive, for the engine thread that waits for them; any thread."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._wake: Callable[[], None] = lambda: None

    def tell(self, wake: Callable[[], None]) -> None:
        """Calls `wake` for each mask from now on: an engine may have nothing else to do."""
        self._wake = wake

    def ring(self) -> None:
        """A mask has arrived, or a grammar has failed."""
        self._arrived.set()
        self._wake()

    def wait(self, matchers: "Iterable[Matcher]", seconds: float) -> None:
        """Returns once none of `matchers` waits for its mask, after `seconds` at the latest."""
        missing = [matcher for matcher in matchers if matcher.is_waiting]
        end = time.monotonic() + seconds
        while missing and (left := end - time.monotonic()) > 0:
            # Cleared before the look: what arrives after it is heard.
            self._arrived.clear()
            missing = [matcher for matcher in missing if matcher.is_waiting]
            if missing:
                self._arrived.wait(left)


class Matcher:
    """Follows one request's output.

    The engine thread reads and accepts; the event loop brings masks and errors.

    `mask`: a bit per token of the vocabulary, least significant first: set if it may come next;
    None while it is computed. `error`: why there will be none. `is_slow`: its last mask took
    longer than `SLOW_MASK_S`, so that no step waits for the next one. `news` rings for both.
    """

    def __init__(
        self, news: MaskNews, ask: Callable[[TokenId], None], close: Callable[[], None]
    ) -> None:
        self.news = news
        self.mask: bytes | None = None
        self.error: GrammarError | None = None
        self.is_slow = False
        self._ask = ask
        self._close = close
        self._asked_at = 0.0

    @property
    def is_waiting(self) -> bool:
        """True while the mask for the next token is computed."""
        return self.mask is None and self.error is None

    def allows(self, token_id: TokenId) -> bool:
        """True if `token_id` may come next; only where the mask is known."""
        assert self.mask is not None
        place = token_id // 8
        return place < len(self.mask) and bool(self.mask[place] >> token_id % 8 & 1)

    def accept(self, token_id: TokenId) -> None:
        """The output goes on with `token_id`, which was allowed."""
        self.mask = None
        self._asked_at = time.monotonic()
        self._ask(token_id)

    def arrived(self, mask: bytes) -> None:
        """The mask for the next token."""
        self.is_slow = bool(self._asked_at) and time.monotonic() - self._asked_at > SLOW_MASK_S
        self.mask = mask

    def close(self) -> None:
        """No token follows; on the event loop."""
        self._close()
