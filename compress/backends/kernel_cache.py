"""The folder of compiled kernels, and the lock under which one process compiles them.

What lies there is loaded and run, so it must be the user's own: a folder that others can write to is not used. The
processes of a machine share it, and one of them compiles while the others wait for what it makes of it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on this system: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

#: Seconds of compiling, or of waiting for it, in silence.
REPORT_AFTER = 2.0
#: Seconds that one kernel may take another process. A stopped one is not waited for any longer.
PATIENCE = 30.0
#: Seconds between two looks at what another process does.
POLL_SECONDS = 0.02


# ---- the folder


def cache_folder() -> Path:
    """$GRADWIRE_CACHE, or "gradwire" in $XDG_CACHE_HOME, or ~/.cache/gradwire."""
    chosen, base, home = os.environ.get("GRADWIRE_CACHE"), os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if chosen:
        return Path(chosen).absolute()
    if os.path.isabs(base):  # by the XDG specification a relative path counts for nothing
        return Path(base, "gradwire")
    return Path(home, ".cache", "gradwire") if os.path.isabs(home) else _spare_folder()  # some users have no home


def folders() -> list[Path]:
    """Where kernels may be loaded from: `cache_folder()`, and if that cannot be written to, one among the temporary
    files as well. New ones go to the last."""
    found = []
    for candidate in (cache_folder, _spare_folder):
        with suppress(OSError):  # there may be no place for temporary files
            folder = candidate()
            if private(folder):
                found.append(folder)
                if os.access(folder, os.W_OK | os.X_OK):
                    break
    return found


def _spare_folder() -> Path:
    return Path(tempfile.gettempdir(), f"gradwire-{os.geteuid()}")


def private(folder: Path) -> bool:
    """Make the folder, for this user alone, unless it is there: then its mode is left as it is. Whether what it holds
    can only be this user's doing, or root's: what an image of a container brings along is often root's. A symbolic link
    in its place must be so too, or its owner could let it lead elsewhere later on."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts, link = folder.stat(), folder.lstat()
    except OSError:
        return False
    return {facts.st_uid, link.st_uid} <= {os.geteuid(), 0} and not facts.st_mode & 0o022


def write(path: Path, content: bytes) -> None:
    """All of it or nothing, even if other processes read or write the same file meanwhile.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(draft).replace(path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise


# ---- whose turn it is


class _Task:
    """A compilation for the user: its name, the seconds it has taken, and whether a message has been printed."""

    def __init__(self, name: str) -> None:
        self.name, self.seconds, self.reported = name, 0.0, False

    def tell(self, began: float, more: str, what: str = "compiling") -> None:
        """Say what is done for this task, unless that has been said or began only just now."""
        if self.reported or self.seconds + time.monotonic() - began < REPORT_AFTER:
            return
        self.reported = True
        if sys.stderr is not None:
            with suppress(OSError, ValueError):  # closed
                print(f"gradwire: {what} kernels for {self.name}, {more}", file=sys.stderr, flush=True)


_turns = threading.RLock()
_task = _Task("this machine")
_began: float | None = None  # when the turn in progress did
_alone = False  # whether to wait for others no longer


@contextmanager
def task(name: str) -> Iterator[None]:
    """Name the purpose of compiling within the block; each name has one message at most."""
    global _task  # noqa: PLW0603 - compiling goes on one at a time in a process
    if _task.name == name:
        yield
        return
    before, _task = _task, _Task(name)
    try:
        yield
    finally:
        _task = before


@contextmanager
def compile_lock(folder: Path | None, ready: Callable[[], bool], lock_name: str = "lock") -> Iterator[None]:
    """Compile within the block, and keep the result in `folder`, if there is one, while no other process has the lock
    of this name; or load it if, after the wait, it is `ready`.

    Blocks may be nested: the outermost counts. Where files cannot be locked, where a process has held the lock for
    `PATIENCE`, or where nothing can be kept, every process compiles for itself.
    """
    global _began  # noqa: PLW0603
    with _turns:
        if _began is not None:
            _tell_compiling(folder, _began)
            yield
            return
        _began = time.monotonic()
        lock: int | None = None
        try:
            if folder is not None and not _alone and not ready():
                lock = _locked(folder / lock_name, ready, _began)
            if ready():
                _release(lock)  # the others may load it too, all at once
                lock = None
            else:
                _tell_compiling(folder, _began)
            yield
        finally:
            _release(lock)
            _task.seconds += time.monotonic() - _began
            _began = None


def nothing_kept() -> None:
    """Note that nothing can be written: from now on no process waits for this one, nor this for another."""
    global _alone  # noqa: PLW0603
    _alone = True


def _tell_compiling(folder: Path | None, began: float) -> None:
    chosen = cache_folder()
    remedy = f"{chosen} must be a folder that you, and you alone, can write to"
    if folder is None:
        _task.tell(began, f"which cannot be kept: {remedy}")
    elif chosen in (folder, *folder.parents):
        _task.tell(began, f"once; kept in {folder}")
    else:
        _task.tell(began, f"once; kept in {folder}, as {remedy}")


def _locked(path: Path, ready: Callable[[], bool], began: float) -> int | None:
    """A descriptor that holds the lock on this file, as the system sees to it only while this process lives; None if
    there is nothing to wait for any longer."""
    global _alone  # noqa: PLW0603
    if fcntl is None:
        return None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            _task.tell(began, "once", "waiting for another process to compile")
        except OSError:  # some network file systems have no locks
            break
        if time.monotonic() - began > PATIENCE:
            _alone = True
            break
        if ready():
            break
        time.sleep(POLL_SECONDS)
    os.close(descriptor)
    return None


def _release(lock: int | None) -> None:
    if lock is not None:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has the descriptor too
        os.close(lock)
