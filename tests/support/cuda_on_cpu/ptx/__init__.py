"""NVRTC's PTX as C++ that this emulator runs: what the compiler made of the kernels, executed without a GPU.

    Module("sign.sm_90.ptx", code=translate(ptx, source), options=OPTIONS)

It sees what running the source cannot: NVVM's optimiser and the undefined behaviour that it may use, the widths of
vectors and their alignment, and arithmetic where the hardware differs from C++: shifts clamp, conversions saturate,
minimum and maximum skip NaN, and the NaN that arithmetic makes is 0x7FFFFFFF. A register that nobody wrote holds
rubbish. Accesses to shared memory and alignment are checked; races and the bounds of arguments are the checked build's
business, on the source. Not covered: ptxas, which turns PTX into machine code, and the order of memory.

`text` reads PTX, `forms` says what each instruction means, `translation` writes the C++. An instruction, or a form of
one, that `forms` does not have is a `PtxError` that names it: nothing is guessed.
"""

from __future__ import annotations

from .text import PtxError
from .translation import translate

#: For g++: integers wrap; the functions are so long that to optimise them takes longer than to run them as they are.
OPTIONS = ("-O0", "-fwrapv", "-w")

__all__ = ["OPTIONS", "PtxError", "translate"]
