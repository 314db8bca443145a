"""A language model with sparse embedding gradients and accumulation: two backward passes before every reduction.

Valid Horovod code except for the import. The text is made up: words that follow each other by fixed rules.

    torchrun --standalone --nproc-per-node 2 examples/horovod/language_model.py
"""

import argparse

import gradwire.hooks.horovod as hvd
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description="language model with sparse embeddings")
parser.add_argument("--vocabulary", type=int, default=2000)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--length", type=int, default=20)
parser.add_argument("--batches-per-allreduce", type=int, default=2, help="backward passes before a reduction")
parser.add_argument("--sparse-as-dense", action="store_true", help="send the whole embedding")
options = parser.parse_args()


class LanguageModel(nn.Module):
    """Predicts the next word from the last ones. The embedding's gradient has the rows of the batch's words only."""

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, sparse=True)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(words))
        return self.head(hidden)


def text(rank: int, step: int) -> torch.Tensor:
    """Sentences in which each word follows from the one before, but for one in ten. Ranks read different ones."""
    generator = torch.Generator().manual_seed(100_000 * rank + step)
    words = [torch.randint(options.vocabulary, (options.batch_size,), generator=generator)]
    for _ in range(options.length):
        surprise = torch.rand(options.batch_size, generator=generator) < 0.1
        other = torch.randint(options.vocabulary, (options.batch_size,), generator=generator)
        words.append(torch.where(surprise, other, (words[-1] * 7 + 3) % 50))
    return torch.stack(words, 1)


hvd.init()
torch.manual_seed(42 + hvd.rank())
model = LanguageModel(options.vocabulary)
lr = 0.3 * hvd.size() / options.batches_per_allreduce
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=options.batches_per_allreduce,
    sparse_as_dense=options.sparse_as_dense,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for step in range(options.steps):
    optimizer.zero_grad()
    mean = torch.zeros(())
    for part in range(options.batches_per_allreduce):
        words = text(hvd.rank(), step * options.batches_per_allreduce + part)
        logits = model(words[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten() % 50)
        loss.backward()
        mean += loss.detach() / options.batches_per_allreduce
    optimizer.step()
    if (step + 1) % 10 == 0:
        mean = hvd.allreduce(mean, name="loss")
        if hvd.rank() == 0:
            print(f"step {step + 1}: loss {mean:.4f}", flush=True)

checks = hvd.allgather_object([float(p.detach().double().sum()) for p in model.parameters()])
if hvd.rank() == 0:
    print("replicas are equal" if all(other == checks[0] for other in checks) else "replicas differ", flush=True)
