"""Steps recorded as CUDA graphs: a replay launches all kernels of a pass at once."""

from collections.abc import Callable
from typing import Any

import structlog
import torch
from torch import Tensor

from engine.ops.backend import Replay

WARM_UPS = 2
"""Passes before the one that is recorded: kernels are compiled, libraries take their workspaces."""

log = structlog.get_logger()


class CudaGraphs:
    """`backend.Recorder` of a CUDA device; all graphs share one pool of memory.

    Replays come one after the other, so that each may write where the others have.
    """

    takes_padding = True

    def __init__(self) -> None:
        self.why_not = ""
        self._pool: Any = None

    def record(self, run: Callable[[], Tensor]) -> tuple[Replay | None, Tensor]:
        """See `backend.Recorder`; `run` is called WARM_UPS times before it is recorded."""
        # Not the default stream, on which nothing can be recorded.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                result = run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile: hand-overs go on.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                result = run()
        # Torch raises it for an operator that no graph can hold, and for a lack of memory.
        except RuntimeError as error:
            self.why_not = str(error)
            log.warning("a step could not be recorded", error=self.why_not)
            return None, result
        self._pool = graph.pool()
        return graph, result
