"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from .mpi_ops import allreduce
from .runtime.context import size
from .runtime.operations import Sum


class SyncBatchNorm(_BatchNorm):
    """Batch normalization whose mean and variance in training are those of the batch on all ranks together.

    On one rank, and in evaluation, it is torch's. Ranks may have batches of different sizes. CPU and CUDA. Arguments as
    for `torch.nn.BatchNorm1d`; the input has 2 dimensions or more, channels second.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        others = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        local = wide.new_tensor([input.numel() / input.shape[1]])
        # In two passes, for the difference of large sums would lose small variances.
        total = allreduce(torch.cat([wide.sum(others), local]), op=Sum)
        count = total[-1].detach()
        mean = total[:-1] / count
        centered = wide - mean.view(shape)
        variance = allreduce(centered.square().sum(others), op=Sum) / count
        self._track(mean.detach(), variance.detach(), float(count))
        result = centered * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor, count: float) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
