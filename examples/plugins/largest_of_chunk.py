"""A codec: the largest element of each chunk, its value in two bytes. Run it: torchrun --nproc-per-node 2 FILE"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from gradwire import CompressState, compress_hook
from gradwire.plugin import SparseCodec
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class LargestOfChunk(SparseCodec):
    """`k` says how many elements it sends at most, and `select` which: all else a sparse codec has from its base."""

    name: ClassVar[str] = "largest_of_chunk"

    chunk: int = 64

    @property
    def value_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def k(self, numel: int) -> int:
        return -(-numel // self.chunk)

    def select(self, x: Tensor, draw: Tensor | None) -> Tensor:
        """Ascending indices, int64. NaN and infinity must be among them, so that they are seen."""
        size = torch.where(x.isfinite(), x.abs(), torch.inf)
        padded = torch.nn.functional.pad(size, (0, -len(x) % self.chunk), value=-1.0).view(-1, self.chunk)
        return padded.argmax(1) + self.chunk * torch.arange(len(padded), device=x.device)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10)))
    state = CompressState(model, LargestOfChunk(), exchange="gather")
    model.register_comm_hook(state, compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,))).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(state.statistics())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
