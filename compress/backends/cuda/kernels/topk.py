"""TopK on a GPU, and what exchanges of sparse gradients need: what launches the kernels of csrc/topk.cu and
csrc/topk_decode.cu."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ... import Workspace, kernel_cache
from ...sparse import S, SparseKernels, whole_rows
from ..block_codec import ReadyLaunch
from ..entries import Entries
from ..runtime.device import SUFFIXES, THREADS, Argument, Device, device_for, grid_for

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
            (write, min(shares, writing), (*source, *marks, k, counts, np.int32(each))),
        )
        return tuple(
            ReadyLaunch(codec, device.function(SELECTING, name), grid, first) for name, grid, first in launches
        )

    def add_raw(self, codec: S, row: Tensor, values: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        k = codec.k(out.numel())
        device, room = self.check(row, 0, 1, out.numel(), k, workspace)
        grid = grid_for(k, device)
        arguments = (out, np.float32(alpha), row, values, np.int32(k), room[0], room[2], workspace.status)
        device.function(FILE, "topk_add")(grid, THREADS, arguments)

    def mean_raw(self, codec: S, rows: Tensor, values: Tensor, out: Tensor, workspace: Workspace) -> None:
        numel, ranks = out.numel(), rows.shape[0]
        k, pitch, memory = codec.k(numel), 4 * rows.stride(0), whole_rows(rows)
        device, room = self.check(memory, pitch, ranks, numel, k, workspace)
        pitches = memory, np.int64(pitch), whole_rows(values), np.int64(4 * values.stride(0))
        mean = np.float32(1) / np.float32(ranks)
        arguments = (out, np.int64(numel), mean, *pitches, np.int32(ranks), np.int32(k), *room, workspace.status)
        device.launch(FILE, f"topk_mean_{SUFFIXES[out.dtype]}", tiles_of(numel), arguments)

    @staticmethod
    def check(
        rows: Tensor, pitch: int, ranks: int, numel: int, k: int, workspace: Workspace
    ) -> tuple[Device, tuple[Tensor, Tensor, Tensor]]:
        """Which wires are broken, where each tile's entries start, and the running maxima of broken wires."""
        device = device_for(rows.device)
        room = workspace.buffers.get("sums")
        if room is None or len(room[0]) < ranks:
            sizes = ranks, ranks * (tiles_of(numel) + 1), ranks * k
            room = tuple(torch.empty(size, dtype=torch.int32, device=rows.device) for size in sizes)
            workspace.buffers["sums"] = room
        broken, starts, reach = room
        broken.zero_()
        what = rows, np.int64(pitch)
        arguments = (*what, np.int32(ranks), np.int64(numel), np.int32(k), broken, starts, workspace.status)
        device.function(FILE, "topk_check")(grid_for(k + 1, device), THREADS, arguments)
        repaired = (*what, np.int64(numel), np.int32(k), broken, starts, reach, workspace.status)
        device.function(FILE, "topk_repair")(ranks, WARP, repaired)
        return device, (broken, starts, reach)
