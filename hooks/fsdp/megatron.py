"""A compressed reduce-scatter with the signature of torch's own, for libraries that let it be replaced.

Megatron-LM calls `dist_reduce_scatter_func(output, input, op=, group=, async_op=)`, a global of its module
`megatron.core.distributed.param_and_grad_buffer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.codec import Codec, check_choice, new_draw
from ...compress.feedback.residual import NOTHING
from ..comm.group import Group
from ..comm.ports import Work
from ..comm.untraced import untraced
from ..exchanges import ExchangeArgs, ReduceScatter
from ..exchanges.reduce_scatter import times_mean


def compressed_reduce_scatter(
    codec: Codec, *, error_feedback: Literal["auto", False] = "auto", seed: int = 0
) -> Callable[..., Work | None]:
    """Make a function that replaces `torch.distributed.reduce_scatter_tensor`.

    That is `reduce_scatter(output, input, op=ReduceOp.SUM, group=None, async_op=False)`, with `output` of n and `input`
    of P·n elements, contiguous, of the same dtype, float32, float16 or bfloat16, on one device. Each rank sends the
    code of a row to its owner, who adds the codes up in float32, in rank order. With `async_op` it returns a handle;
    both tensors must be left alone until its `wait`. Every rank must call, and wait, in the same order.

    It knows no parameters, so that nothing can be kept between calls: use unbiased codecs, such as `QSGD()` and
    `EDEN()` (Alistarh et al., NeurIPS 2017; Vargaftik et al., ICML 2022).

    Args:
        codec: the codec; equal on all ranks.
        error_feedback: False accepts codecs that need a residual, such as `Cast(torch.bfloat16)`.
        seed: seed of stochastic rounding.

    Raises:
        TypeError, ValueError: `codec` is no codec, or needs a residual. The function: `output` and `input` do not fit,
            or `op` is neither a sum nor a mean; RuntimeError: no process group, or a rank did not respond.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f"codec={codec!r}: expected a codec, such as QSGD()")
    check_choice("error_feedback", error_feedback, ("auto", False))
    if error_feedback == "auto" and codec.default_feedback:
        raise ValueError(
            f"{codec} needs a residual, and a reduce-scatter without parameters keeps "
            "none: take QSGD() or EDEN(), or error_feedback=False, which loses the rest"
        )
    calls = _Calls(codec, seed)

    @untraced
    def reduce_scatter(
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        handle = calls.start(output, input, op, dist.group.WORLD if group is None else group)
        if async_op:
            return handle
        handle.wait()
        return None

    return reduce_scatter


# It does not use the Reducer, whose steps begin, end and are compared: the caller knows no steps and no parameters,
# may have several calls in flight, and names the group with each.
class _Calls:
    """The exchanges of one function, each for one call at a time: as many of a kind as are in flight together."""

    def __init__(self, codec: Codec, seed: int) -> None:
        self._codec, self._seed = codec, seed
        self._made: weakref.WeakKeyDictionary[Any, tuple[Group, dict[Any, list[_Lane]]]] = weakref.WeakKeyDictionary()

    def start(self, output: Tensor, input: Tensor, op: Any, process_group: Any) -> _Handle:
        if process_group is None:
            raise RuntimeError("a reduce-scatter needs torch.distributed: call init_process_group() first")
        ranks = process_group.size()
        times = times_mean(op, ranks)
        alike = output.dtype == input.dtype and output.device == input.device
        if not alike or input.numel() != ranks * output.numel() or not output.numel():
            raise ValueError(
                f"output has {output.numel()} elements of {output.dtype} on {output.device}, input {input.numel()} of "
                f"{input.dtype} on {input.device}: of {ranks} ranks input must have {ranks} times as many, of one kind"
            )
        if not (output.is_contiguous() and input.is_contiguous()):
            raise ValueError("output and input must be contiguous: the result is written to output")
        if process_group not in self._made:
            self._made[process_group] = Group(process_group).channel("compressed_reduce_scatter"), {}
        group, lanes = self._made[process_group]
        free = lanes.setdefault((output.numel(), output.device), [])
        lane = next((lane for lane in free if lane.handle is None), None)
        if lane is None:
            stream = 2 * group.rank << 32 | sum(map(len, lanes.values())) * ranks
            lane = _Lane(self._codec, output, group, new_draw(self._seed, 0, stream, output.device))
            free.append(lane)
        lane.handle = _Handle(lane, output, input, times)
        return lane.handle


class _Lane:
    """An exchange, and its current call."""

    def __init__(self, codec: Codec, output: Tensor, group: Group, draw: Tensor) -> None:
        self.exchange = ReduceScatter(codec, output.numel(), 0, output.device, group)
        self.draw, self.nothing = draw, torch.empty(0, device=output.device)
        self.handle: _Handle | None = None


class _Handle:
    """A call in flight."""

    def __init__(self, lane: _Lane, output: Tensor, input: Tensor, times: float) -> None:
        self._lane, self._output, self._times = lane, output, times
        lane.draw[1] += 1
        operands = ExchangeArgs(input.view(-1), output.view(-1), lane.nothing, NOTHING, (), lane.draw, lane.draw)
        self._failure: str | None = None
        lane.exchange.group.traffic.begin(self)
        with torch.no_grad():
            self._work: Work | None = next(lane.exchange.reduce(operands))

    @untraced
    def wait(self) -> None:
        """Wait for `output`; over NCCL, on the current stream. May be called again, also after a signal handler has
        raised; once it has failed, it always does."""
        if self._failure is not None:
            raise RuntimeError(f"this reduce-scatter failed when it was first waited for: {self._failure}")
        if self._work is None:
            return
        with torch.no_grad():
            try:
                self._work.wait()
            except RuntimeError as error:  # Gloo would report the message as completed
                self._failure = str(error)
                raise
            self._lane.exchange.decode(self._output)
            if self._times != 1.0:
                self._output.mul_(self._times)
        self._lane.exchange.port.post_receives()
        self._lane.exchange.group.traffic.end(self)
        self._lane.handle = self._work = None
