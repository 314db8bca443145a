"""DDP's communication hook. Annotations stay evaluated here: `register_comm_hook` compares them with its own."""

import torch
import torch.distributed as dist

from .state import CompressState


def compress_hook(state: CompressState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace a bucket's gradients by their mean over the ranks, compressed on the way.

    Equivalent to DDP's all-reduce followed by a division by the world size, up to what the codec leaves out; that
    stays in `state` and goes with a later step. Register it with `model.register_comm_hook(state, compress_hook)`.

    Args:
        state: made for this model, once.
        bucket: DDP's; float32, float16 or bfloat16.

    Returns:
        A future of `bucket.buffer()`, holding the mean.

    Raises:
        RuntimeError: compression or a peer has failed; later buckets raise it, or else the end of the backward pass.
        TypeError: this is no bucket of DDP's own reducer.
    """
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            f"compress_hook got a {type(bucket).__name__}, expected DDP's GradBucket: under torch.compile set "
            'torch._dynamo.config.optimize_ddp = "ddp_optimizer", as "python_reducer" calls hooks otherwise'
        )
    return state.submit(bucket)
