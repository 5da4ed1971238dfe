"""fla's kernels for the operators' tests, and for nobody else."""

import sys
from importlib import import_module

# transformers asks for `fla` alone, which tests/conftest.py hides; its modules find each other.
del sys.modules["fla"]
for name in ("gated_delta_rule", "kda", "simple_gla"):
    import_module(f"fla.ops.{name}")
sys.modules["fla"] = None  # type: ignore[assignment]
