"""The column of CUDA devices in the table of operators; imports Triton, so import it by name.

Rules of its kernels:

- A decode step reads no list and asks the device nothing, so that a CUDA graph can hold it. What
  differs from step to step is read by the kernels from tensors whose places stay: `units`,
  `block_tables`, `slot_mapping` and `positions`; a decode's length is its position + 1.
- A graph is for more rows than a step may have. Rows that are left over have unit -1 and slots -1,
  and position 0: kernels read what such a row names, and write nothing for it but its own row of
  the result.
- The result of a row depends on that row alone: not on the batch, nor on how a grid is cut. Torch's
  products are left out of it: the library may add up in another order for other numbers of rows.
"""

from dataclasses import replace

from engine.ops.activation.cuda import make_activation
from engine.ops.backend import Ops
from engine.ops.causal_conv1d.cuda import causal_conv1d
from engine.ops.cuda_graphs import CudaGraphs
from engine.ops.experts.cuda import CudaExperts
from engine.ops.gate.cuda import gate
from engine.ops.gated_delta_rule.cuda import gated_delta_rule
from engine.ops.gated_norm.cuda import CudaGatedNorm
from engine.ops.lookup.cuda import lookup
from engine.ops.norm.cuda import CudaNorm
from engine.ops.paged_attention.cuda import CudaAttention
from engine.ops.rotary.cuda import rotate_
from engine.ops.selective_scan.cuda import selective_scan
from engine.ops.ssd.cuda import ssd


def fill(torch_ops: Ops) -> Ops:
    """The column: kernels where there are some, `torch_ops` for the rest."""
    return replace(
        torch_ops,
        name="cuda",
        recorder=CudaGraphs(),
        experts=CudaExperts,
        causal_conv1d=causal_conv1d,
        gated_delta_rule=gated_delta_rule,
        selective_scan=selective_scan,
        ssd=ssd,
        norm=CudaNorm,
        gated_norm=CudaGatedNorm,
        activation=make_activation,
        gate=gate,
        rotate_=rotate_,
        lookup=lookup,
        paged_attention=CudaAttention(),
    )
