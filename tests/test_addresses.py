"""Kernels get addresses: what lies behind them is checked where a tensor becomes one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire.compress import backends
from gradwire.compress.backends import use_backend
from gradwire.compress.backends.addresses import address, rows_at
from gradwire.compress.backends.entry_kernels import EntryKernels, Pieces
from gradwire.compress.backends.sparse import entries_for, whole_rows
from gradwire.compress.entries import index_bytes
from torch import Tensor

K = 8
REFUSED = r"without gaps|have gaps"


def odd(x: Tensor) -> list[Tensor]:
    """The same numbers, as no kernel may read them: a column, at one address, of another type."""
    return [torch.stack([x, x], dim=-1)[..., 0], x[..., :1].expand(x.shape), x.double()]


def operations(kernels: EntryKernels) -> dict[str, tuple[Any, list[Tensor]]]:
    """Each of the kernels that take tensors by address, and sound tensors for it."""
    indices, values = torch.arange(0, 80, 10, dtype=torch.int32), torch.ones(K)
    residual, wire = torch.zeros(100), torch.zeros(index_bytes(100, K), dtype=torch.uint8)
    value_wire, pieces = torch.zeros(2 * K, dtype=torch.uint8), Pieces([K], [0], [100])
    out = torch.zeros(K, dtype=torch.int32), torch.zeros(K)
    half = torch.bfloat16
    return {
        "pack indices": (lambda i, w: kernels.pack_indices(i, None, 0, 100, w), [indices, wire]),
        "unpack indices": (lambda w, i: kernels.unpack_indices(w, 0, 100, None, i), [wire[None], indices[None]]),
        "pack values": (
            lambda v, w, i, r: kernels.pack_values(v, half, w, i, None, r),
            [values, value_wire, indices, residual],
        ),
        "unpack values": (lambda w, v: kernels.unpack_values(w, half, v), [value_wire[None], values[None]]),
        "pack index pieces": (lambda i, w: kernels.pack_index_pieces(i, pieces, w), [indices, wire]),
        "unpack index pieces": (lambda w, i: kernels.unpack_index_pieces(w, pieces, i), [wire, indices]),
        "pack value pieces": (
            lambda v, w, i, r: kernels.pack_value_pieces(v, pieces, half, w, i, r),
            [values, value_wire, indices, residual],
        ),
        "unpack value pieces": (lambda w, v: kernels.unpack_value_pieces(w, pieces, half, v), [value_wire, values]),
        "put back": (lambda i, v, k, r: kernels.put_back((i, v), k, r), [indices, values, indices[:2], residual]),
        "merge": (lambda i, v, a, b: kernels.merge(i, v, (0, K), 0, 100, a, b), [indices, values, *out]),
    }


@pytest.mark.parametrize("name", operations(None))  # type: ignore[arg-type]
def test_no_kernel_takes_memory_with_gaps(name: str) -> None:
    with use_backend("cpu"):
        run, sound = operations(entries_for(torch.device("cpu")))[name]
    run(*sound)
    for place, tensor in enumerate(sound):
        for wrong in odd(tensor):
            with pytest.raises(ValueError, match=REFUSED):
                run(*sound[:place], wrong, *sound[place + 1 :])


def test_what_has_no_gaps_has_an_address() -> None:
    x = torch.arange(12.0)
    assert address(x[3:]) == x.data_ptr() + 12
    assert address(x.view(3, 4)) == x.data_ptr()
    assert address(x.as_strided((1,), (7,))) == x.data_ptr()  # of one element the stride means nothing
    assert rows_at(x.view(3, 4)[:, :2]) == (x.data_ptr(), 16)
    assert rows_at(x.as_strided((1, 4), (5, 1))) == (x.data_ptr(), 20)
    assert rows_at(x.as_strided((3, 1), (2, 9))) == (x.data_ptr(), 8)
    assert whole_rows(x.as_strided((3, 1), (2, 9))).tolist() == [0, 1, 2, 3, 4]


def test_what_has_none_is_refused() -> None:
    x = torch.arange(12.0)
    for wrong in (x[::2], x[:1].expand(5), x.view(3, 4)[:, :2], torch.complex(x, x).conj().imag[:1]):
        with pytest.raises(ValueError, match=REFUSED):
            address(wrong)
    with pytest.raises(ValueError, match=r"of torch\.int32"):
        address(x, torch.int32)
    for rows in (x.view(3, 4).T, x.view(3, 4)[:, ::2], x[:1].expand(3, 4)):
        with pytest.raises(ValueError, match=REFUSED):
            rows_at(rows)
        with pytest.raises(ValueError, match=REFUSED):
            whole_rows(rows)


def test_nothing_else_takes_an_address() -> None:
    folder = Path(backends.__file__).parent
    takers = {path.name for path in folder.glob("*.py") if re.search(r"\.data_ptr\(", path.read_text())}
    assert takers == {"addresses.py"}
