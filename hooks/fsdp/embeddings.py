"""Embeddings with sparse gradients beside FSDP, which does not reduce them: every rank has the whole table."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..core.sparse_gradient import sparse_names
from ..sparse.all_reduce import sparse_all_reduce
from ..sparse.validation import Algorithm


def reduce_rows(model: nn.Module, group: dist.ProcessGroup | None = None, *, algorithm: Algorithm = "auto") -> None:
    """Replace the gradients of a model's sparse embeddings by their mean over the ranks, row by row and exactly.

    For tables (`nn.Embedding(sparse=True)`, `nn.EmbeddingBag(sparse=True)`) that `fully_shard(…, ignored_params=…)` has
    left out. Call it on every rank after backward and before the optimizer; after several backward passes, once. A rank
    that has not used a table sends no rows, and gets those of the others. Gradients stay sparse, equal bit for bit on
    all ranks; a table that no rank has used keeps none. Ranks must begin with equal tables.

    Args:
        model: the owner of the tables, in any of its parts; sharded and frozen parameters are left alone.
        group: the ranks, of all shards and replicas; by default all.
        algorithm: `sparse_all_reduce`'s, which carries the rows.

    Raises:
        TypeError: a gradient is dense where rows are expected.
        ValueError, RuntimeError: `sparse_all_reduce`'s, on every rank alike.
    """
    parameters = dict(model.named_parameters())
    for name in sorted(sparse_names(model, parameters)):
        table = parameters[name]
        if not table.requires_grad:
            continue
        grad = table.grad
        if grad is None:
            indices, values = torch.empty(0, dtype=torch.int64, device=table.device), table.detach()[:0]
        else:
            if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
                raise TypeError(f"the gradient of {name!r} is not one of rows, but {grad.layout}: reduce it otherwise")
            grad = grad.coalesce() if grad.dtype == torch.float32 else grad.float().coalesce().to(grad.dtype)
            indices, values = grad.indices()[0], grad.values()
        rows, means = sparse_all_reduce(indices, values, table.shape[0], group=group, algorithm=algorithm)
        if grad is not None or len(rows):
            table.grad = torch.sparse_coo_tensor(
                rows[None], means, table.shape, is_coalesced=True, check_invariants=False
            )
