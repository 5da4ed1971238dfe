"""The KV cache groups of another project's engine, which tells them only with its blocks."""

from typing import Final

from proxy.routing.layout_index import MAMBA, SLIDING_WINDOW
from serving.kv_events.wire import FULL_ATTENTION, BlockStored
from serving.rpc.messages import KVGroupInfo

MAX_GROUPS: Final = 64
MAX_WINDOW: Final = 2**31
_FULL, _STATE = KVGroupInfo(FULL_ATTENTION), KVGroupInfo(MAMBA)
_WINDOWS = {SLIDING_WINDOW, "sliding_window_mla", "chunked_local_attention"}


class EngineGroups:
    """By group index what is known of each; one that is known stays what it is.

    `told`: what was known before. It holds until a group tells its kind, for publishers that never
    do so, and after that for kinds of which no group was seen: nothing is there yet.
    """

    def __init__(self, told: tuple[KVGroupInfo, ...]) -> None:
        self._told = told
        self._learned: dict[int, KVGroupInfo] = {}

    @property
    def layout(self) -> tuple[KVGroupInfo, ...]:
        """All groups up to the last that was seen, and one for each kind that must be there."""
        if not self._learned:
            return self._told
        # Of a group between others nothing is known. As one of Mamba it holds no checkpoint, so
        # nobody resumes, and whatever it is, the attention of the others is there.
        numbers = range(max(self._learned) + 1)
        groups = [self._learned.get(number, _STATE) for number in numbers]
        has_states = {group.kind == MAMBA for group in groups}
        return (*groups, *(it for it in self._told if (it.kind == MAMBA) not in has_states))

    def of(self, group: int) -> KVGroupInfo | None:
        """The group of an index; None if nothing was said of it."""
        if not self._learned and group == 0:
            return self._told[0]
        return self._learned.get(group)

    def learn(self, event: BlockStored) -> bool:
        """True if the layout is another one after this event."""
        group, before = event.group_idx or 0, self.layout
        if event.kv_cache_spec_kind is None or group in self._learned:
            return False
        if not 0 <= group < MAX_GROUPS:
            return False
        self._learned[group] = _of(event)
        return self.layout != before

    def fits(self, event: BlockStored) -> bool:
        """False for a group that is not known, or said to be of another kind."""
        known = self.of(event.group_idx or 0)
        return known is not None and (event.kv_cache_spec_kind is None or _of(event) == known)


def _of(event: BlockStored) -> KVGroupInfo:
    """Of unknown kinds, sinks and latent attention the whole prefix must be there."""
    kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
    if kind == MAMBA:
        return _STATE
    # A chunk of local attention is read by tokens of its own, at most as many as in a window.
    if kind in _WINDOWS and window is not None and 0 < window <= MAX_WINDOW:
        return KVGroupInfo(SLIDING_WINDOW, window)
    return _FULL
