"""Throughput on made-up data: how many samples a second all ranks process together.

Valid Horovod code except for the import, and for `--compression` other than none and fp16, which Horovod does not have.

    torchrun --standalone --nproc-per-node 2 examples/horovod/synthetic_benchmark.py --compression topk
"""

import argparse
import time

import gradwire.hooks.horovod as hvd
import torch
import torch.nn.functional as F
from torch import nn

COMPRESSIONS = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "bf16": lambda: hvd.Compression.bf16,
    "topk": lambda: hvd.Compression.topk(density=0.01),
    "onebit": hvd.Compression.onebit,
    "qsgd": lambda: hvd.Compression.qsgd(bits=4),
    "terngrad": hvd.Compression.terngrad,
    "ternary": hvd.Compression.ternary,
}

parser = argparse.ArgumentParser(description="synthetic benchmark")
parser.add_argument("--width", type=int, default=512, help="of each linear layer")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--num-warmup-batches", type=int, default=3)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--compression", choices=COMPRESSIONS, default="none")
parser.add_argument("--use-adasum", action="store_true")
options = parser.parse_args()

hvd.init()
torch.manual_seed(1)
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)

layers = []
for _ in range(options.layers):
    layers += [nn.Linear(options.width, options.width), nn.ReLU()]
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=COMPRESSIONS[options.compression](),
    op=hvd.Adasum if options.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.randn(options.batch_size, options.width, device=device)
target = torch.randint(options.width, (options.batch_size,), device=device)


def benchmark_step() -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


def batches(count: int) -> float:
    """Seconds for so many batches."""
    start = time.perf_counter()
    for _ in range(count):
        benchmark_step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


log(
    f"{options.layers} layers of width {options.width}, batch {options.batch_size}, {hvd.size()} ranks on {device.type}"
)
batches(options.num_warmup_batches)
rates = []
for number in range(options.num_iters):
    seconds = batches(options.num_batches_per_iter)
    rates.append(options.batch_size * options.num_batches_per_iter / seconds)
    log(f"iteration {number}: {rates[-1]:.1f} samples/s per rank")
rates = hvd.allreduce(torch.tensor(rates), op=hvd.Sum, name="rates")
spread = 1.96 * float(rates.std(unbiased=False))
log(f"{options.compression}: {float(rates.mean()):.1f} +- {spread:.1f} samples/s on {hvd.size()} ranks")
