"""TopK on a GPU, and what exchanges of sparse gradients need: what launches the kernels of csrc/topk.cu and
csrc/topk_decode.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....formats.entries import index_layout
from ... import Workspace, kernel_cache
from ...kernels import parts_of
from ...sparse import S, SparseKernels, whole_rows
from ..block_codec import ReadyLaunch
from ..entries import Entries, groups_of
from ..runtime.device import FORMS, SUFFIXES, THREADS, Argument, Device, device_for, grid_for

FILE, SELECTING = "topk_decode.cu", "topk.cu"
WARP = 32
#: Elements that a block of threads takes at once.
TILE = 2048
#: `State` of the kernels: eleven words, and a histogram for each of three digits.
STATE_WORDS = 11 + 4096


def tiles_of(numel: int) -> int:
    return -(-numel // TILE)


def capacity_of(numel: int, k: int) -> int:
    """Room for candidates. The prediction aims at 1.3 k, and finds many times as many while gradients add up in the
    residual; a pass over all elements costs more than they do."""
    return min(max(4 * k, numel // 32), numel) + TILE


class TopK(SparseKernels[S]):
    """Exact selection among the candidates of one pass, decided on the device; see csrc/topk.cu."""

    entries = Entries()

    def workspace(self, codec: S, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        tiles, capacity = tiles_of(numel), capacity_of(numel, codec.k(numel))
        workspace.buffers |= {
            "state": torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
            "index": torch.empty(capacity, dtype=torch.int32, device=device),
            "value": torch.empty(capacity, dtype=torch.float32, device=device),
            "tiles": torch.empty(tiles, 2, dtype=torch.int32, device=device),
            "counts": torch.empty(tiles, dtype=torch.int64, device=device),
            "not_finite": torch.empty(tiles * THREADS, dtype=torch.uint8, device=device),
        }
        return workspace

    def prepare(self, codec: S, dtype: torch.dtype, device: torch.device) -> None:
        with kernel_cache.task(type(codec).__name__):
            device_for(device).function(SELECTING, f"topk_collect_{SUFFIXES[dtype]}")
            device_for(device).function(FILE, "topk_check")
            self.entries.prepare(device)  # exchanges pack entries even where the codec does not

    def encode_raw(
        self,
        codec: S,
        x: Tensor,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        key = "select", x.dtype
        ready: tuple[ReadyLaunch, ...] | None = workspace.buffers.get(key)
        if ready is None or ready[0].codec is not codec:
            ready = workspace.buffers[key] = self._selecting(codec, x, workspace)
        collect, digits, write = ready
        for launch in (collect, digits):
            launch.function(launch.grid, THREADS, (x, residual, *launch.first))
        write.function(write.grid, THREADS, (x, residual, *write.first, row, values))

    @staticmethod
    def _selecting(codec: S, x: Tensor, workspace: Workspace) -> tuple[ReadyLaunch, ...]:
        """The three launches, for gradients like x."""
        numel, room, device = x.numel(), workspace.buffers, device_for(x.device)
        tiles, k = tiles_of(numel), np.int32(codec.k(numel))
        collect, digits, write = (f"topk_{name}_{SUFFIXES[x.dtype]}" for name in ("collect", "digits", "write"))
        source = np.int64(numel), room["state"], room["index"], room["value"]
        marks = room["tiles"], room["not_finite"]
        capacity, counts = np.int32(len(room["index"])), room["counts"]
        # In these two blocks depend on one another: more than there is room for would wait to no purpose.
        counting, writing = device.wave(SELECTING, digits), device.wave(SELECTING, write)
        each = min(-(-tiles // writing), THREADS)
        shares = -(-tiles // each)
        launches: tuple[tuple[str, int, tuple[Argument, ...]], ...] = (
            (collect, device.grid(SELECTING, collect, tiles), (*source, capacity, *marks, counts, np.int32(shares))),
            (digits, min(tiles, counting), (*source, capacity, *marks, k)),
            (write, min(shares, writing), (*source, capacity, *marks, k, counts, np.int32(each))),
        )
        return tuple(
            ReadyLaunch(codec, device.function(SELECTING, name), grid, first) for name, grid, first in launches
        )

    def decode_add(self, codec: S, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        device, entries, _ = self._entries(codec, parts_of(codec, wire, out.numel()), out.numel(), workspace)
        arguments = out, np.float32(alpha), *entries, workspace.status
        device.function(FILE, "topk_add")(grid_for(codec.k(out.numel()), device), THREADS, arguments)

    def decode_mean(self, codec: S, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        numel, ranks = out.numel(), len(wires[0])
        device, entries, starts = self._entries(codec, wires, numel, workspace)
        target = out, np.int64(numel), np.float32(1) / np.float32(ranks)
        arguments = *target, *entries, np.int32(ranks), *starts, workspace.status
        device.launch(FILE, f"topk_mean_{SUFFIXES[out.dtype]}", tiles_of(numel), arguments)

    def _entries(
        self, codec: S, wires: Sequence[Tensor], numel: int, workspace: Workspace
    ) -> tuple[Device, tuple[Argument, ...], tuple[Argument, ...]]:
        """The ranks' entries as kernels take them, indices unpacked or looked at; and where tiles' entries start."""
        (indices, values), ranks, k = wires, len(wires[0]), codec.k(numel)
        device, layout = device_for(indices.device), index_layout(numel, k)
        low_bits = layout.low_bits if codec.packs_indices else 0
        shift = max(low_bits, TILE.bit_length() - 1)
        room: tuple[Tensor, ...] | None = workspace.buffers.get("lists")
        if room is None or len(room[0]) < ranks:
            sizes = (ranks, 1 + k), (ranks, groups_of(numel, shift) + 1), (0 if codec.packs_indices else ranks,)
            room = tuple(torch.empty(size, dtype=torch.int32, device=indices.device) for size in sizes)
            workspace.buffers["lists"] = room
        rows, starts, broken = room
        if codec.packs_indices:
            noted = starts, shift, workspace.status
            self.entries.unpack_indices(indices, 0, numel, rows[:ranks, 0], rows[:ranks, 1:], noted)
            listed: tuple[Argument, ...] = rows, np.int64(4 * (1 + k)), np.int32(k), np.int32(low_bits), None, None
        else:
            what = whole_rows(indices), np.int64(indices.stride(0))
            broken.zero_()
            checked = *what, np.int32(ranks), np.int64(numel), np.int32(k), broken, starts, workspace.status
            device.function(FILE, "topk_check")(grid_for(k + 1, device), THREADS, checked)
            repaired = *what, np.int64(numel), np.int32(k), broken, starts, rows, workspace.status
            device.function(FILE, "topk_repair")(ranks, WARP, repaired)
            listed = *what, np.int32(k), np.int32(0), broken, rows
        packed = whole_rows(values), np.int64(values.stride(0)), np.int32(FORMS[codec.value_dtype])
        return device, (*listed, *packed), (starts, np.int32(shift))
