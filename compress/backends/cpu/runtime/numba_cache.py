"""Machine code that numba made, kept in gradwire's own folder instead of numba's: see `kernel_cache`.

numba keeps an index for each function, which processes without a common lock overwrite, and which counts a function as
changed when its own file is. Here a function with the types of its arguments is a file, named by its content's digest,
in a folder for all that the machine code depends on: sources, versions, processor. So checkouts, environments and
machines share a home folder, and nothing stale is ever loaded.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ... import kernel_cache

CPU = Path(__file__).resolve().parents[1]

#: What kernels are made of. What numba cannot see from one function: another file, or a constant of another module.
SOURCES = ("**/[!_]*.py", "../low_precision.py", "../power_sgd.py", "../../formats/entries.py")

#: Seconds after which a folder that nobody has used goes, once another is made.
OLD = 30 * 24 * 3600


@functools.cache
def folder_name() -> str:
    """Of the folder for this code on this machine."""
    digest = hashlib.sha256()
    for part in (
        sys.implementation.cache_tag,
        *(module.__version__ for module in (numba, llvmlite, np)),
        llvmlite.binding.get_host_cpu_name(),
        *(path.read_text("utf-8") for pattern in SOURCES for path in sorted(CPU.glob(pattern))),
    ):
        digest.update(f"{part}\0".encode())
    return f"cpu-{digest.hexdigest()[:16]}"


class Cache(_Cache):
    """What numba asks for a function's machine code, and gives it to.

    Attributes:
        loaded, compiled: how many signatures this process has found, and how many it has not.
    """

    loaded = compiled = 0

    def __init__(self, function: Callable) -> None:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        self._function = function.__module__, function.__qualname__, function.__code__.co_code, dumps(cells)
        self._enabled = True

    @property
    def cache_path(self) -> str | None:
        return str(_folder() or "") or None

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        """Nothing is ever stale."""

    def has(self, signature: Any, context: Any) -> bool:
        return any(os.path.exists(path) for path in self._paths(signature, context))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """numba's CompileResult for these arguments, or None."""
        target_context.refresh()
        for path in self._paths(sig, target_context) if self._enabled else ():
            # Whatever is wrong with a file, compiling again replaces it.
            with suppress(Exception):
                content = path.read_bytes()
                if hashlib.sha256(content[32:]).digest() == content[:32]:
                    found = CompileResult._rebuild(target_context, *pickle.loads(content[32:]))
                    Cache.loaded += 1
                    return found
        Cache.compiled += 1
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep numba's CompileResult."""
        if not self._enabled or data.lifted or data.library.has_dynamic_globals:
            return
        content = dumps(data._reduce())
        try:
            for path in self._paths(sig, data.target_context)[-1:]:
                kernel_cache.write(path, hashlib.sha256(content).digest() + content)
        except OSError:  # a full disk
            kernel_cache.nothing_kept()

    def _paths(self, signature: Any, context: Any) -> list[Path]:
        """Where it may be, and last where it belongs."""
        # numba's names of the target and its options: the environment may ask it for another processor.
        key = hashlib.sha256(repr((self._function, signature, context.codegen().magic_tuple())).encode()).hexdigest()
        name = f"{self._function[1].replace('<locals>', '')}-{key[:16]}.bin"
        return [folder / folder_name() / name for folder in kernel_cache.folders()]


def use(dispatcher: Any) -> None:
    """Keep what numba compiles for one of our functions, and compile it once a machine."""
    if not hasattr(dispatcher, "compile"):
        return  # NUMBA_DISABLE_JIT
    cache = dispatcher._cache = Cache(dispatcher.py_func)
    alone = dispatcher.compile

    def compile(signature: Any) -> Any:
        if signature in dispatcher.overloads:
            return alone(signature)
        folder = _folder()
        # Loading takes its turn as well: with numba's lock held, no thread may come to wait for ours.
        with kernel_cache.compile_lock(folder, lambda: cache.has(signature, dispatcher.targetctx)):
            return alone(signature)

    dispatcher.compile = compile


def _folder() -> Path | None:
    """Where new code goes."""
    folders = kernel_cache.folders()
    if not folders:
        return None
    _opened(folders[-1] / folder_name())
    return folders[-1] / folder_name()


@functools.cache
def _opened(folder: Path) -> None:
    """The folder is used; where it is new, others may be old."""
    with suppress(OSError):
        if folder.exists():
            os.utime(folder)
            return
        for other in folder.parent.glob("cpu-*"):
            if time.time() - other.stat().st_mtime > OLD:
                shutil.rmtree(other, ignore_errors=True)
