"""Runs CUDA C++ kernels on the CPU, for tests: no GPU, no driver, no toolkit; g++ is enough.

    module = Module("csrc/onebit.cu", check=True)
    module.get_function("onebit_encode_f32")((grid,), (block,), (x, wire, np.int64(numel)))

`include/` gives g++ the CUDA language, `runtime/` runs each CUDA thread as a fiber of its own (barriers, warp
collectives, atomics, shared memory, divergent exits). The checked build turns data races, accesses out of bounds or
misaligned, reads of uninitialised shared memory, divergent barriers, wrong masks and deadlocks into an
`EmulationError` that names the line of the `.cu` file.

Not covered: inline PTX and cooperative groups (guard them with `#ifndef CUDA_ON_CPU` and keep a plain path), a missing
`__threadfence` (memory is sequentially consistent here), what `__expf`, `rsqrtf` and `__fdividef` lose on a GPU, and
anything about speed.
"""

from __future__ import annotations

from .compiler import KERNEL, EmulationError
from .launcher import Kernel, Module

__all__ = ["KERNEL", "EmulationError", "Kernel", "Module"]
