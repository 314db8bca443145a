"""PowerSGD: two thin factors of each matrix."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..power_sgd import LEAST, ROWS, Matrices, PowerSGDKernels
from .arithmetic import F32, LANES, NAN, block_sums, canonical_nan, in_blocks


class PowerSGD(PowerSGDKernels):
    def take(self, matrices: Matrices, x: Tensor, whole: Tensor) -> None:
        for begin, length, columns, at, *_ in matrices.rows:
            if not columns:
                whole.numpy()[at : at + length] = canonical_nan(x.numpy()[begin : begin + length])

    def left(self, matrices: Matrices, x: Tensor, start: Tensor, out: Tensor) -> None:
        for begin, rows, columns, left, right in self.each(matrices):
            m = x.numpy()[begin : begin + rows * columns].reshape(rows, columns)
            for k in range(matrices.rank):
                s = start.numpy()[right + k * columns :][:columns]
                with np.errstate(all="ignore"):
                    products = np.stack([in_blocks(row * s, LANES).reshape(-1) for row in m])
                    out.numpy()[left + k * rows :][:rows] = block_sums(products)

    def orthonormalise(self, matrices: Matrices, left: Tensor) -> None:
        for _, rows, _, at, _ in self.each(matrices):
            p = left.numpy()[at : at + matrices.rank * rows].reshape(matrices.rank, rows)
            if not np.isfinite(p).all():
                p[:] = NAN
                continue
            for k in range(matrices.rank):
                before = np.sqrt(self.dot(p[k], p[k]))
                for j in range(k):
                    p[k] = p[k] - self.dot(p[j], p[k]) * p[j].astype(np.float64)
                after = np.sqrt(self.dot(p[k], p[k]))
                p[k] = p[k].astype(np.float64) / after if after > before * LEAST else 0.0

    def right(self, matrices: Matrices, x: Tensor, left: Tensor, out: Tensor) -> None:
        for begin, rows, columns, at, right in self.each(matrices):
            m = x.numpy()[begin : begin + rows * columns].reshape(rows, columns)
            for k in range(matrices.rank):
                p, total = left.numpy()[at + k * rows :][:rows, None], np.zeros(columns, F32)
                with np.errstate(all="ignore"):
                    for first in range(0, rows, ROWS):
                        part = np.zeros(columns, F32)
                        for product in m[first : first + ROWS] * p[first : first + ROWS]:
                            part = part + product
                        total = total + part
                out.numpy()[right + k * columns :][:columns] = total

    def settle(self, matrices: Matrices, left: Tensor, right: Tensor) -> None:
        for _, rows, columns, at, to in self.each(matrices):
            p, q = left.numpy()[at : at + matrices.rank * rows], right.numpy()[to : to + matrices.rank * columns]
            if not np.isfinite(q).all():
                p[:] = q[:] = NAN

    def follow(self, matrices: Matrices, right: Tensor, start: Tensor) -> None:
        for _, _, columns, _, to in self.each(matrices):
            for first in range(to, to + matrices.rank * columns, columns):
                q = right.numpy()[first : first + columns]
                length = np.sqrt(self.dot(q, q))
                if np.isfinite(length) and length > 0:
                    start.numpy()[first : first + columns] = q.astype(np.float64) / length

    def add(self, matrices: Matrices, numbers: Tensor, out: Tensor, alpha: float, fresh: bool, status: Tensor) -> None:
        whole, left, right = (part.numpy() for part in matrices.split(numbers))
        target = out.numpy()
        if fresh:
            target[:] = 0
        with np.errstate(all="ignore"):
            for begin, rows, columns, at, to, *_ in matrices.rows:
                if columns:
                    ends = at + matrices.rank * rows, to + matrices.rank * columns
                    p, q = left[at : ends[0]], right[to : ends[1]]
                    status[1] += int(not (np.isfinite(p).all() and np.isfinite(q).all()))
                    values = self.product(matrices.rank, p, q)
                else:
                    values = whole[at : at + rows]
                    status[1] += int((~np.isfinite(values)).sum())
                target[begin : begin + values.size] += F32(alpha) * values

    def leave(self, matrices: Matrices, left: Tensor, right: Tensor, total: Tensor, residual: Tensor) -> None:
        for begin, rows, columns, at, to, *_ in matrices.rows:
            p, q = left.numpy()[at : at + matrices.rank * rows], right.numpy()[to : to + matrices.rank * columns]
            here = slice(begin, begin + rows * max(1, columns))
            with np.errstate(all="ignore"):
                sent = self.product(matrices.rank, p, q) if columns else total.numpy()[here]
                rest = total.numpy()[here] - (sent + F32(0))
            residual.numpy()[here] = np.where(np.isfinite(rest), rest, residual.numpy()[here])

    @staticmethod
    def each(matrices: Matrices) -> list[list[int]]:
        """Start, rows, columns, and where P and Q begin, of each matrix."""
        return [row[:5] for row in matrices.rows if row[2]]

    @staticmethod
    def dot(a: np.ndarray, b: np.ndarray) -> np.float64:
        """In float64, by 256 partial sums."""
        result: np.float64 = block_sums(in_blocks(a.astype(np.float64) * b, LANES).reshape(1, -1))[0]
        return result

    @staticmethod
    def product(rank: int, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        """P·Qᵀ, flat."""
        left, right = p.reshape(rank, -1, 1), q.reshape(rank, 1, -1)
        total = left[0] * right[0]
        for k in range(1, rank):
            total = total + left[k] * right[k]
        return total.reshape(-1)
