"""What NVRTC makes of the kernels of csrc/, kept from one run of the tests to the next."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import NamedTuple

from cuda_on_cpu.compiler import cached
from gradwire.compress.backends.cuda.runtime import compiler
from gradwire.compress.backends.cuda.runtime.compiler import CSRC, OPTIONS, Compiled

#: As far as the NVRTC at hand knows them.
ARCHITECTURES = tuple(n for n in (75, 80, 86, 89, 90, 100, 120) if n in compiler.supported_architectures())
FILES = sorted(path.name for path in CSRC.glob("*.cu"))


class Resources(NamedTuple):
    """What one kernel takes: registers a thread, bytes of shared memory a block, bytes of stack and spills a thread."""

    registers: int
    shared: int
    stack: int
    spilled: int


@functools.cache
def build(file: str, architecture: int) -> Compiled:
    """csrc/`file` for one architecture, with ptxas' verbose log."""
    options = ("--ptxas-options=--verbose",)
    parts = [file, str(architecture), compiler.version(), *OPTIONS[:-1], *options]  # the last is a clone's place
    parts += [path.read_text("utf-8") for path in (CSRC / file, *sorted((CSRC / "include").glob("*.cuh")))]

    def make(draft: Path) -> None:
        draft.write_bytes(pickle.dumps(compiler.compile_file(file, architecture, options)))

    found: Compiled = pickle.loads(cached(tuple(parts), ".pickle", make).read_bytes())
    return found
