"""The environment variables that tests may see."""

from __future__ import annotations

from collections.abc import MutableMapping

#: What finds programs, files and packages, what makes a GPU work or a processor needs, and the suite's own.
NAMES = ("HOME", "PATH", "TMPDIR", "PYTHONPATH", "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
BEGINNINGS = ("CUDA_", "GRADWIRE_", "NCCL_", "NVIDIA_", "OPENBLAS_", "PIP_", "PYTEST_", "SSL_CERT_")


def forget_others(environment: MutableMapping[str, str]) -> None:
    """Take away all others, so that no machine's settings decide whether a test passes: PYTHONUNBUFFERED, for
    example, had long hidden a script that lost its output."""
    for name in set(environment) - set(NAMES):
        if not name.startswith(BEGINNINGS):
            del environment[name]
