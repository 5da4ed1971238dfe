"""Hides fla from transformers: import this first where models of theirs run on a CPU.

Where transformers finds fla it computes with its kernels, on a CPU too, where they do not run.
"""

import sys

sys.modules["fla"] = None  # type: ignore[assignment]
