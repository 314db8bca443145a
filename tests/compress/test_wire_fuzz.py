"""No wire is trusted: whatever bytes arrive, decoding counts what it skips, and touches nothing but its output."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from wire_fuzz import Fuzz

WIRES, CASES_OF_A_PROCESS = 1_000_000, 50_000


def test_a_thousand_wires() -> None:
    fuzz, threads = Fuzz(seed=0, emulated_share=250), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(1000):
            fuzz.run(number)
    finally:
        torch.set_num_threads(threads)
        fuzz.close()
    assert fuzz.counts["wires through cpu"] == fuzz.counts["wires through reference"] >= 1000
    assert fuzz.counts["wires through cuda"] >= 4
    assert min(fuzz.counts["skipped entries"], fuzz.counts["not finite"]) > 0


@pytest.mark.soak
def test_a_million_wires(tmp_path: Path) -> None:
    """In processes of their own: a fault ends one of them, and the case that it died of is written down."""
    script, place = Path(__file__).parents[1] / "support" / "wire_fuzz.py", tmp_path / "at"
    counts: Counter[str] = Counter()
    first = 0
    while counts["wires"] < WIRES:
        command = [sys.executable, str(script), "1", str(first), str(CASES_OF_A_PROCESS), str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=7200)
        where = place.read_text().strip() if place.exists() else "the first case"
        assert done.returncode == 0, f"{where} ended the process with {done.returncode}:\n{done.stderr[-3000:]}"
        counts.update(ast.literal_eval(done.stdout))
        first += CASES_OF_A_PROCESS
        print(f"{first} cases: {dict(counts)}", file=sys.stderr, flush=True)
    assert counts["wires through cuda"] >= WIRES // 200
