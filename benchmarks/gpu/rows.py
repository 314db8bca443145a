"""One row of the report, made by a process of its own. A failure becomes a row that says so."""

from __future__ import annotations

import importlib
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...compress.backends.cuda.runtime import compiler
from ...compress.backends.cuda.runtime.device import device_for
from ..common import report
from . import paths, speed

#: Elements that a family's bytes are compared on: one record with a tail, and many tiles.
COMPARED = (1, 4097, 100_003)


def row(options: Namespace) -> dict[str, Any]:
    """The result of the section and name that `--row` gives."""
    section, name = options.row
    device = torch.device(options.device)
    torch.empty(1, device=device)  # so that CuPy finds torch's context
    return dict(WORK[section](name, device, options))


def probe(name: str, device: torch.device, options: Namespace) -> dict[str, Any]:
    """The GPU, the installed versions, and whatever does not work."""
    facts: dict[str, Any] = report.environment()
    facts |= report.gpu()
    facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    facts["multiprocessors"] = torch.cuda.get_device_properties(device).multi_processor_count
    facts["cupy"] = next((v for v in map(report.version, ("cupy-cuda13x", "cupy-cuda12x", "cupy")) if v), None)
    facts["sources"] = report.sources()
    facts["broken"] = {}
    facts["nvrtc"] = working(facts["broken"], "launching", lambda: opened(device))
    for module in ("numba", "pytest", "hypothesis"):
        working(facts["broken"], module, partial(importlib.import_module, module))
    facts["xdist"] = report.version("pytest-xdist")
    return facts


def working(broken: dict[str, str], what: str, attempt: Callable[[], Any]) -> Any:
    """The result of an attempt; None, and an entry in `broken`, where it fails, in whatever way."""
    try:
        return attempt()
    except Exception as error:  # a broken package may raise anything
        broken[what] = f"{type(error).__name__}: {error}".splitlines()[0]
        return None


def opened(device: torch.device) -> str:
    """NVRTC's version, once the device can be launched on."""
    device_for(device)
    return compiler.version()


def compiled(file: str, device: torch.device, options: Namespace) -> dict[str, Any]:
    """One file of csrc/, compiled for this GPU without the cache, and what NVRTC says."""
    architecture = compiler.architecture_for(
        torch.cuda.get_device_capability(device), compiler.supported_architectures()
    )
    start = time.perf_counter()
    result = compiler.compile_file(file, architecture)
    spent = time.perf_counter() - start
    return {"architecture": architecture, "seconds": spent, "bytes": len(result.cubin), "log": result.log}


def same_bytes(family: str, device: torch.device, options: Namespace) -> dict[str, Any]:
    if family == paths.LONG:
        numel = 2**31 - 1 if options.numel > max(COMPARED) else 3 * options.numel
        return {"compared": paths.long(device, numel), "numels": [numel]}
    numels = [numel for numel in COMPARED if numel <= options.numel]
    return {"compared": paths.equal(family, device, numels), "numels": numels}


def once(family: str, device: torch.device, options: Namespace) -> dict[str, Any]:
    return {"calls": paths.once(family, device, min(options.numel, 60_001))}


def timed(name: str, device: torch.device, options: Namespace) -> dict[str, Any]:
    codec = next(codec for codec in speed.CODECS if speed.label(codec) == name)
    return speed.kernels(codec, device, options.numel, options.ranks, options.repeats)


WORK: dict[str, Callable[[str, torch.device, Namespace], dict[str, Any]]] = {
    "probe": probe,
    "compile": compiled,
    "bytes": same_bytes,
    "kernels": timed,
    "paths": once,
}
