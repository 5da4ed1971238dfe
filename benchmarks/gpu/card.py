"""The phase `card`: the machine, the software, and the limits that other figures stand beside."""

import importlib
import inspect
import platform
import subprocess
from functools import partial
from importlib import metadata

import torch

from benchmarks.gpu.sheet import Ceilings, Setting, Sheet, gb_per_s

HOST = 1 << 30


def run(sheet: Sheet, setting: Setting) -> None:
    """Names first, then rates; each is the median of many."""
    with sheet.attempt("software"):
        triton = metadata.version("triton") if setting.on_gpu else "none"
        sheet.tell(
            "python, torch, triton", f"{platform.python_version()}, {torch.__version__}, {triton}"
        )
    with sheet.attempt("varlen_attn"):
        varlen = importlib.import_module("torch.nn.attention.varlen")
        sheet.tell("varlen_attn", inspect.signature(varlen.varlen_attn))
    if setting.on_gpu:
        facts = torch.cuda.get_device_properties(0)
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,compute_mode",
            "--format=csv,noheader",
        ]
        sheet.tell("card", facts)
        with sheet.attempt("driver"):
            asked = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
            sheet.tell("driver", asked.stdout.strip())
    found = Ceilings.measure(setting)
    sheet.tell("copy on the device, read and written", f"{found.copy / 1e9:,.0f} GB/s")
    sheet.tell("read on the device", f"{found.read / 1e9:,.0f} GB/s")
    sheet.tell("bf16 product of 8,192", f"{found.product / 1e12:,.0f} TFLOP/s")
    part = torch.zeros(16 << 20 if setting.quick else HOST, dtype=torch.uint8).to(setting.device)
    host = torch.empty(part.numel(), dtype=torch.uint8, pin_memory=setting.on_gpu)
    plain = torch.empty(part.numel(), dtype=torch.uint8)
    for case, to, of in (
        ("device to pinned host", host, part),
        ("pinned host to device", part, host),
        ("device to plain host", plain, part),
        ("plain host to device", part, plain),
    ):
        sheet.tell(case, gb_per_s(part.numel(), setting.seconds(partial(to.copy_, of))))
    small = torch.zeros(1, device=setting.device)
    taken = setting.seconds(lambda: [small.add_(1) for _ in range(1000)])
    sheet.tell("one small operator, queued", f"{taken * 1e3:.1f} us")
    sheet.tell("one number to the host", f"{setting.seconds(small.item, 100) * 1e6:.0f} us")
