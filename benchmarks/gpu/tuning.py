"""Tuning of Triton's kernels in this process: its time, and fla's choices as files of its own.

fla reads `FLA_CONFIG_DIR`/KERNEL.json where `FLA_CACHE_MODE` is `strict`, as `fla.ops.utils.cache`
of fla-core 0.6.0 says, and tunes only what it does not find there. Choices that are saved are for
this card and this Triton.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from math import inf, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

CONFIGS, UNTUNED_CONFIGS = "fla", "fla-untuned"
"""Their folders in the folder of a run: of what was measured, and of what was just taken."""
TUNED = frozenset({"kernels", "speed"})
"""Phases that measure fla's kernels."""
UNTUNED = frozenset({"operators", "parity", "pairs"})
"""Phases that only compare what they compute."""


class Stopwatch:
    """The time of all tuning from its making on, compilation included."""

    def __init__(self) -> None:
        self.seconds, self.kernels = 0.0, 0
        autotuner = import_module("triton.runtime.autotuner").Autotuner
        bench = autotuner._bench

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            try:
                return bench(*args, **kwargs)
            finally:
                self.seconds += perf_counter() - started
                self.kernels += 1

        autotuner._bench = timed


def take_the_first() -> None:
    """From now on nothing is tuned: of a kernel's configurations the first that runs is taken.

    Where only results matter, since tuning compiles all of them.
    """
    autotuner = import_module("triton.runtime.autotuner").Autotuner
    bench = autotuner._bench

    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The arguments are a new dictionary in every run of a tuner.
        if vars(self).get("settled") is self.nargs:
            return [inf] * 3
        found = bench(self, *args, **kwargs)
        self.settled = self.nargs if isfinite(found[0]) else None
        return found

    autotuner._bench = measured


def save(folder: Path) -> int:
    """Adds this process's choices to the files in `folder`; their number."""
    if "fla.ops.utils.cache" not in sys.modules:
        return 0
    cache = sys.modules["fla.ops.utils.cache"]
    count = 0
    for tuner in _tuners(cache.CachedAutotuner):
        if not tuner.cache:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{tuner.kernel_name}.json"
        known = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
        entries = known.get("autotune_entries", {})
        for key, config in tuner.cache.items():
            entries[cache.AutotuneKey.key_hash(key)] = {
                "autotune_key": cache.AutotuneKey.normalize_autotune_key(key),
                "config": {
                    "kwargs": config.kwargs,
                    "num_warps": config.num_warps,
                    "num_stages": config.num_stages,
                    "num_ctas": config.num_ctas,
                    "maxnreg": config.maxnreg,
                    "ir_override": config.ir_override,
                },
            }
        count += len(tuner.cache)
        content = {
            "kernel_name": tuner.kernel_name,
            "triton_version": version("triton"),
            "autotune_entries": entries,
        }
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
    return count


def _tuners(kind: type) -> list[Any]:
    """The tuners around the kernels of fla's modules; a kernel may have several wrappers."""
    found = {}
    # The collector would not know them: a node freezes what is there when it starts.
    modules = [module for name, module in sys.modules.items() if name.startswith("fla.")]
    for value in [value for module in modules for value in vars(module).values()]:
        kernel = value
        while kernel is not None and type(kernel) is not kind:
            kernel = getattr(kernel, "fn", None)
        if kernel is not None:
            found[id(kernel)] = kernel
    return list(found.values())
