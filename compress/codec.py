"""The contract of a codec.

A codec turns a flat gradient into a *wire*, a fixed number of bytes, and back. It talks to no network and keeps no
state: what it remembers between calls lies in a `Workspace`, and error feedback belongs to its caller.

What every codec promises, and the contract tests hold it to:

- **Size.** `wire_bytes(numel)` depends on `numel` alone. The wire is a sequence of equal records, one for each `block`
  elements (`formats.wire`), so a slice of the gradient that starts at a block is a slice of the wire, and wires laid
  end to end decode as one. The wire of a sparse codec cannot be sliced.
  Parts are exchanged one by one; indices and values are parts, and exchanges that know entries take those one by one
  too (`SparseCodec`).
- **Canonical bytes.** The same input and draw give the same bytes on every backend and every run. Sums over a block
  accumulate in 256 partial sums, element i into sum i mod 256, which then fold in halves, 128 down to 1; no fused
  multiply-add; subnormals are kept; NaN is written as one bit pattern; unused bytes are zero.
- **Input** is float32, float16 or bfloat16, flat and contiguous, at any alignment, of any length from 1. Arithmetic and
  residuals are float32. A tail shorter than a block takes a whole record, and what is missing enters no statistic.
- **Stochastic rounding** draws 16 bits an element from Philox4x32-10 (Salmon et al., SC 2011): key from the seed,
  counter from position, stream and step (`new_draw`). A level is off by at most 2^-16 of itself on average.
- **Nothing is lost.** After `encode_feedback`, decoded + new residual = gradient + old residual, to rounding.
- **Non-finite input stays visible.** A NaN or an infinity makes its block (sparse and cast codecs: its position) decode
  to a non-finite number, while the residual of that block or position stays what it was. A block whose statistics
  overflow float32 counts as non-finite too.
- **A wire is never trusted.** An index out of range or out of order, or a code outside its table, is skipped and
  counted in `workspace.status`; whatever the bytes are, nothing is written outside `out`.
- **Replicas agree.** `decode_mean` adds in rank order, multiplies once by 1/P and casts once.
- **Fused equals composed.** `encode_feedback` and `decode_mean` equal what `encode` and `decode_add` give when put
  together, bit for bit (`backends.Kernels`).

To add a codec, write a frozen dataclass that derives from `BlockCodec` (equal records: `name`, `block_size` and
`fields`), from `SparseCodec` (entries: `name`, `k` and `select`) or, for anything else, from `Codec` (`name` and
`parts`). Unless the backends have kernels under that name, or it is sparse, its `kernels` method returns your own
`Kernels`. One that needs the shapes of parameters learns them by `for_layout`, and one that an exchange was made for
names that (`exchange`). To have it in the contract tests, the benchmarks and the command line, add an example of it to
`compress.CODECS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from .backends import Kernels, LowPrecisionVector, MomentumInput, Workspace, kernels_for
from .deprecated import Renamed
from .formats.layout import Layout
from .formats.wire import Part

#: Philox counts eight draws in each of 2^32 positions: beyond that, elements would share their noise.
MOST_ELEMENTS = 1 << 35
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def new_draw(seed: int, step: int = 0, stream: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """The state of a stochastic code, int64[3] on `device`: seed, step, stream.

    Philox's key is the seed (two 32-bit words) and its counter (position // 8, stream's low word, step, stream's high
    word); element i takes 16-bit draw i % 8 of the four words it returns. Distinct streams (rank, bucket) or steps
    never share a draw. Write `draw[1]` to advance the step; encoding only reads it.
    """
    draw = torch.empty(3, dtype=torch.int64, device=device)
    for place, word in enumerate((seed, step, stream)):  # a copy from the host would wait for the device
        draw[place] = word
    return draw


#: Names in the releases up to 0.2.
OLD_NAMES = {
    "of_means": "second_pass",
    "of_layout": "for_layout",
    "timed_as": "speed_key",
    "encode_entering": "encode_momentum",
}


@dataclass(frozen=True)
class Codec(Renamed, ABC, renamed=OLD_NAMES):
    """A way to compress a gradient. See the module's docstring for what it promises."""

    name: ClassVar[str]
    #: The exchange that is made for it, where there is one.
    exchange: ClassVar[str] = ""
    #: Where the idea was published.
    source: ClassVar[str] = ""

    @property
    def block_size(self) -> int | None:
        """Elements per record, or None for a codec whose wire cannot be sliced."""
        return None

    @property
    def stochastic(self) -> bool:
        """True if encoding draws random numbers."""
        return False

    @property
    def unbiased(self) -> bool:
        """True if the error averages out over the draws."""
        return self.stochastic and not self.default_feedback

    @property
    def lossless(self) -> bool:
        return False

    @property
    def default_feedback(self) -> bool:
        """True if `error_feedback="auto"` keeps a residual: for lossy codes that contract, as deterministic ones do."""
        return not (self.stochastic or self.lossless)

    def with_feedback(self) -> Codec:
        """This codec as it must be when a residual is kept: feedback around an unbiased code that is no contraction
        lets the residual grow without end, so stochastic codecs return their round-to-nearest form here."""
        return self

    def second_pass(self) -> Codec:
        """The codec with which owners of slices encode the mean: by default this one."""
        return self

    def for_layout(self, layout: Layout) -> Codec:
        """This codec for the parameters of a bucket, where it needs to know their shapes; () forgets them."""
        return self

    @property
    def speed_key(self) -> Codec:
        """The codec whose measured speed stands for this one's. Measuring takes all ranks, and a schedule may have many
        codecs that are much alike."""
        return self

    @abstractmethod
    def parts(self, numel: int) -> tuple[Part, ...]:
        """The parts of the wire of `numel` elements."""

    def wire_bytes(self, numel: int) -> int:
        """Length in bytes of the wire of `numel` elements."""
        return sum(self.part_bytes(numel))

    def part_bytes(self, numel: int) -> tuple[int, ...]:
        """Length in bytes of each part of the wire."""
        return _part_bytes(self, numel)

    def bits_per_element(self, numel: int = 1 << 20) -> float:
        """Bits on the wire for each element of a gradient of `numel` elements."""
        return self.wire_bytes(numel) * 8 / numel

    def kernels(self, device: torch.device) -> Kernels:
        """The kernels of this codec on `device`."""
        return kernels_for(device, self.name)

    def workspace(self, numel: int, device: torch.device | str = "cpu") -> Workspace:
        """Memory for repeated calls with `numel` elements on `device`. Not for use by two threads at once.

        Raises:
            ValueError: `numel` is not positive, or too large for this codec.
        """
        if numel <= 0:
            raise ValueError(
                f"cannot compress {numel} elements: a gradient needs at least one; leave out empty tensors"
            )
        if numel > MOST_ELEMENTS:
            raise ValueError(f"cannot compress {numel} elements at once: split the gradient into parts of at most 2^35")
        self.parts(numel)
        device = torch.device(device)
        kernels = self.kernels(device)
        workspace = kernels.workspace(self, numel, device)
        workspace.codec, workspace.kernels = self, kernels
        return workspace

    def encode(self, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        """Write the code of `x` to `wire`.

        Args:
            x: flat contiguous float32, float16 or bfloat16 of n ≥ 1 elements.
            wire: uint8 of `wire_bytes(n)`, on the same device, starting at a multiple of 4 bytes.
            draw: from `new_draw`; only stochastic codecs read it.
            workspace: from `workspace(n, device)`.

        Raises:
            TypeError, ValueError: an argument is of the wrong type, shape, dtype, device or size.
        """
        self._check_gradient(x)
        self._check_wire(wire, x)
        self._check_draw(draw)
        self._kernels(workspace, x).encode(self, x, wire, draw, workspace)

    def decode_add(self, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        """`out += alpha * decoded`, out being flat contiguous float32. Raises as `encode` does."""
        self._check_gradient(out, "out", (torch.float32,))
        self._check_wire(wire, out)
        self._kernels(workspace, out).decode_add(self, wire, out, alpha, workspace)

    def encode_feedback(
        self,
        grad: Tensor,
        residual: Tensor | LowPrecisionVector,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        """Error feedback in one pass: a = grad + residual; wire = code of a; residual = a - decoded.

        Where a or what it decodes to is not finite, the residual keeps its old value.

        Args:
            grad: as `x` in `encode`; unchanged.
            residual: float32 of the same length, updated in place; or one that is kept in fewer bytes, which gives
                the same as if it were float32 meanwhile (`backends.low_precision_vector`).
            wire, draw, workspace: as in `encode`. Raises as `encode` does.
        """
        self._check_gradient(grad, "grad")
        if not isinstance(residual, LowPrecisionVector):
            self._check_gradient(residual, "residual", (torch.float32,))
        if residual.numel() != grad.numel() or residual.device != grad.device:
            raise ValueError(
                f"residual has {residual.numel()} elements on {residual.device}, grad {grad.numel()} on {grad.device}: "
                "they must match"
            )
        self._check_wire(wire, grad)
        self._check_draw(draw)
        kernels = self._kernels(workspace, grad)
        if isinstance(residual, LowPrecisionVector):
            kernels.encode_low_precision(self, grad, residual, wire, draw, workspace)
        else:
            kernels.encode_feedback(self, grad, residual, wire, draw, workspace)

    def encode_momentum(
        self, x: MomentumInput, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        """`encode_feedback` of what comes out of a momentum that a gradient enters, in the same pass where the backend
        can. Other arguments and errors as there, the residual float32."""
        self._check_gradient(residual, "residual", (torch.float32,))
        if residual.numel() != x.numel():
            raise ValueError(f"residual has {residual.numel()} elements, grad {x.numel()}: they must match")
        self._check_wire(wire, residual)
        self._check_draw(draw)
        self._kernels(workspace, residual).encode_momentum(self, x, residual, wire, draw, workspace)

    def decode_mean(self, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        """`out` = mean over ranks of what they sent: float32 sum in rank order, times 1/P, cast to `out.dtype`.

        Args:
            wires: one uint8 tensor [P, bytes] for each part of the wire; rows may lie apart, at multiples of 4 bytes.
            out: flat contiguous float32, float16 or bfloat16.
            workspace: as in `encode`.

        Raises:
            TypeError, ValueError: as `encode`.
        """
        self._check_gradient(out, "out")
        sizes = self.part_bytes(out.numel())
        if len(wires) != len(sizes):
            raise ValueError(f"{self} has {len(sizes)} parts on the wire, got {len(wires)} tensors")
        for part, size in zip(wires, sizes, strict=True):
            if part.dim() != 2 or part.shape[0] != wires[0].shape[0] or part.shape[0] < 1:
                raise ValueError(f"wires must be 2-D, one row a rank, the same in each part; got {tuple(part.shape)}")
            whole = part.dtype == torch.uint8 and part.shape[1] == size and part.is_contiguous()
            if not whole or part.data_ptr() % 4 or part.device != out.device:
                self._check_bytes(part[0], size, out)
            if part.stride(0) % 4:
                raise ValueError(f"rows of a wire must lie at multiples of 4 bytes, not {part.stride(0)}")
        self._kernels(workspace, out).decode_mean(self, wires, out, workspace)

    def _check_gradient(self, x: Tensor, what: str = "gradient", dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{what} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(f"{what} has layout {x.layout}: make it dense first, e.g. with nn.Embedding(sparse=False)")
        if x.dtype not in dtypes:
            names = ", ".join(str(d) for d in dtypes)
            raise TypeError(f"{what} has dtype {x.dtype}, expected one of {names}: convert it with .to({dtypes[0]})")
        if x.dim() != 1 or not x.is_contiguous():
            raise ValueError(
                f"{what} of shape {tuple(x.shape)} must be flat and contiguous: pass x.contiguous().view(-1)"
            )
        if x.numel() == 0:
            raise ValueError(f"{what} is empty: a gradient needs at least one element; leave out empty tensors")

    def _kernels(self, workspace: Workspace, x: Tensor) -> Kernels:
        if workspace.codec is not self or workspace.kernels is None:
            return self.kernels(x.device)
        if workspace.status.device != x.device:
            raise ValueError(
                f"the workspace is on {workspace.status.device}, the gradient on {x.device}: take one from "
                f"codec.workspace(numel, {str(x.device)!r})"
            )
        return workspace.kernels

    def _check_wire(self, wire: Tensor, x: Tensor) -> None:
        self._check_bytes(wire, self.wire_bytes(x.numel()), x)

    def _check_bytes(self, wire: Tensor, size: int, x: Tensor) -> None:
        if not isinstance(wire, Tensor) or wire.dtype != torch.uint8:
            raise TypeError(f"a wire must be a uint8 tensor, got {getattr(wire, 'dtype', type(wire).__name__)}")
        if wire.device != x.device:
            raise ValueError(f"the wire is on {wire.device}, the gradient on {x.device}: put them on one device")
        if wire.dim() != 1 or wire.numel() != size or not wire.is_contiguous():
            raise ValueError(
                f"{self} puts {x.numel()} elements on {size} contiguous bytes, got shape {tuple(wire.shape)}: "
                f"allocate torch.empty(codec.wire_bytes({x.numel()}), dtype=torch.uint8)"
            )
        if wire.data_ptr() % 4:
            raise ValueError("a wire must start at a multiple of 4 bytes: slice it at record boundaries")

    def _check_draw(self, draw: Tensor | None) -> None:
        if self.stochastic and (draw is None or draw.dtype != torch.int64 or draw.numel() != 3):
            raise ValueError(f"{self} rounds stochastically and needs a draw: pass new_draw(seed, step, stream)")


@dataclass(frozen=True)
class BlockCodec(Codec):
    """A codec whose wire is one record for each block of elements."""

    #: `block` must be a multiple of this, so that a record's bytes come out whole.
    block_multiple: ClassVar[int] = 256

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Elements of a block."""

    @abstractmethod
    def fields(self) -> tuple:
        """The fields of one record."""

    def parts(self, numel: int) -> tuple[Part, ...]:
        return (Part("blocks", self.fields(), -(-numel // self.block_size)),)

    def _check_block(self, block: int, name: str = "block") -> None:
        if not isinstance(block, int) or block <= 0 or block % self.block_multiple or block > 1 << 16:
            raise ValueError(
                f"{name}={block!r}: expected a positive multiple of {self.block_multiple}, at most {1 << 16} elements"
            )


@lru_cache(maxsize=4096)
def _part_bytes(codec: Codec, numel: int) -> tuple[int, ...]:
    return tuple(part.nbytes for part in codec.parts(numel))


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def check_flag(name: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected True or False")


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raises ValueError unless `value` is a number with low < value <= high."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or not low < value <= high:
        raise ValueError(f"{name}={value!r}: expected a number in ({low}, {high}]")
