"""Tensors of a checkpoint that a model does not load, by the part of their names that says so."""

from collections import Counter

import structlog

from engine.model_configs.model_config import Renames, skipped_by

log = structlog.get_logger()


class Skipped:
    """Counts them and their bytes, to be told in one line."""

    def __init__(self, renames: Renames) -> None:
        self._renames = renames
        self._tensors: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def add(self, stored: str, num_bytes: int) -> None:
        """One tensor that `renames` skip."""
        part = skipped_by(stored, self._renames)
        self._tensors[part] += 1
        self._bytes[part] += num_bytes

    def tell(self) -> None:
        """Says what was skipped, if anything was."""
        if self._tensors:
            log.info(
                "parts of the checkpoint are not used",
                tensors=dict(self._tensors),
                bytes=dict(self._bytes),
            )
