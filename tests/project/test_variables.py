"""The suite is a stranger: no machine's settings reach its tests, and continuous integration has none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from variables import forget_others

ROOT = Path(__file__).parents[2]
FOREIGN = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "de_DE", "TERM": "dumb", "CI": "true"}
#: Of somebody who has started ranks in this shell before.
RANKS = {
    "RANK": "7",
    "MASTER_ADDR": "10.0.0.9",
    "GLOO_SOCKET_IFNAME": "eth7",
    "HOROVOD_TIMELINE": "/t",
    "COLUMNS": "30",
}


def test_tests_see_the_variables_that_they_may_and_no_others() -> None:
    assert not [name for name in FOREIGN | RANKS if name in os.environ]
    given = {"HOME": "/h", "PATH": "/p", "GRADWIRE_CACHE": "/c"}
    environment = given | FOREIGN | RANKS
    forget_others(environment)
    assert environment == given


def test_continuous_integration_passes_on_what_pip_needs_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$@"\nexec env\n', "utf-8")
    make.chmod(0o755)
    kept = {"HOME": "/my home", "PIP_CERT": "/c", "PIP_EXTRA_INDEX_URL": "a b", "SSL_CERT_FILE": "/f"}
    for name, value in (kept | FOREIGN | RANKS).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", path := f"{tmp_path}:{os.environ['PATH']}")
    output = subprocess.run([ROOT / ".ci" / "run"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert output[0] == "--no-print-directory test"
    seen = dict(line.split("=", 1) for line in output[1:])
    expected = kept | {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "OPENBLAS_", "SSL_CERT_"))
    }
    assert {name: seen[name] for name in seen.keys() - {"PWD", "SHLVL", "_"}} == expected | {"PATH": path}
