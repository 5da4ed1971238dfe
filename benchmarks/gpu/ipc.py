"""The phase `ipc`: whether a process may read another's device memory, and how fast."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.sheet import BYTES, SPANS, Setting, Sheet, gb_per_s

WAIT_S = 30.0


def run(sheet: Sheet, setting: Setting) -> None:
    """This process copies out of the other's allocation, whose handle torch opens."""
    context: Any = torch.multiprocessing.get_context("spawn")
    tensors, done = context.SimpleQueue(), context.Event()
    process = context.Process(target=_own, args=(tensors, done, setting.device))
    process.start()
    try:
        theirs = tensors.get()
        ours = torch.empty_like(theirs)
        for count in SPANS:
            length = BYTES // count
            # The pieces come in another order, so that neighbours are never one copy.
            order = [(7 * number) % count * length for number in range(count)]

            taken = setting.seconds(partial(_copy, theirs, ours, order, length=length))
            is_right = bool(torch.equal(ours, theirs))
            ours.fill_(0)
            sheet.tell(
                f"588 MiB from another process, {count} spans",
                gb_per_s(BYTES, taken),
                "right" if is_right else "wrong",
            )
        del theirs
    finally:
        done.set()
        process.join(WAIT_S)


def _copy(theirs: Tensor, ours: Tensor, order: list[int], *, length: int) -> None:
    for at in order:
        ours[at : at + length].copy_(theirs[at : at + length])


def _own(tensors: Any, done: Any, device: str) -> None:
    """The other process: it has the memory, until all has been read."""
    mine = torch.randint(0, 255, (BYTES,), dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    tensors.put(mine)
    done.wait(WAIT_S)
