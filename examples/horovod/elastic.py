"""Elastic training: a rank is lost in the second epoch, and the job goes on from the last commit.

Valid Horovod code except for the import; only the launcher differs. torchrun restarts the workers:

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/horovod/elastic.py
"""

import argparse
import os

import gradwire.hooks.horovod as hvd
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description="elastic training")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--batches-per-commit", type=int, default=2)
parser.add_argument("--lose-rank", type=int, default=1, help="which rank dies in the second epoch; -1: none")
options = parser.parse_args()

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(options.samples, 10, generator=generator)
targets = inputs @ torch.randn(10, 1, generator=generator)
dataset = torch.utils.data.TensorDataset(inputs, targets)

hvd.init()
torch.manual_seed(hvd.rank())
model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=options.batch_size, sampler=sampler)


def lose_a_rank(state: hvd.elastic.TorchState) -> None:
    """As a machine that goes down would: without a word. Once, in the first life of the job."""
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first_life and hvd.rank() == options.lose_rank and state.epoch == 1 and state.batch == 5:
        os._exit(1)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    if hvd.rank() == 0:
        print(f"begin at epoch {state.epoch + 1}, batch {state.batch}, on {hvd.size()} ranks", flush=True)
    while state.epoch < options.epochs:
        loss = torch.zeros(())
        begin = state.batch
        for index, (x, y) in enumerate(loader):
            lose_a_rank(state)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            sampler.record_batch(index, options.batch_size)
            state.batch = begin + index + 1
            if state.batch % options.batches_per_commit == 0:
                state.commit()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {state.epoch + 1}: {state.batch} batches, loss {mean:.4f}", flush=True)
        state.epoch += 1
        state.batch = 0
        sampler.set_epoch(state.epoch)
        state.commit()


train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0))
if hvd.rank() == 0:
    print("finished", flush=True)
