"""Exceptions for a Horovod script to catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed after it was submitted: the ranks disagree, or one of them is gone.

    Raised by `synchronize`, on every rank that submitted the operation. `elastic.run` takes it as the sign to go back
    to the last commit.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by an elastic state's `commit` and `check_host_updates`: the launcher is about to restart the workers."""
