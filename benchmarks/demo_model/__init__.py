"""The small model of the demo: its text, its training, what it has learned."""

import sys

# Where transformers finds fla it computes with its kernels, on a CPU too, where they do not run.
sys.modules["fla"] = None  # type: ignore[assignment]
