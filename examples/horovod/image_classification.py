"""Image classification with mixed precision: clipping and unscaling between `synchronize` and `step`.

Valid Horovod code except for the import. The images are made up: ten patterns under noise, the same on every machine.

    torchrun --standalone --nproc-per-node 2 examples/horovod/image_classification.py
"""

import argparse

import gradwire.hooks.horovod as hvd
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description="image classification with AMP")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--samples", type=int, default=1024)
parser.add_argument("--base-lr", type=float, default=0.02)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
parser.add_argument("--use-adasum", action="store_true")
options = parser.parse_args()


def make_images(samples: int, seed: int) -> torch.utils.data.TensorDataset:
    """16 × 16 images of ten fixed patterns under noise."""
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(42))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    images = patterns[labels] + 1.5 * torch.randn(samples, 1, 16, 16, generator=generator)
    return torch.utils.data.TensorDataset(images, labels)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(x.flatten(1))


hvd.init()
torch.manual_seed(42)
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)
half = torch.float16 if device.type == "cuda" else torch.bfloat16

train_set, test_set = make_images(options.samples, seed=1), make_images(256, seed=2)
sampler = torch.utils.data.distributed.DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(train_set, batch_size=options.batch_size, sampler=sampler)
test_sampler = torch.utils.data.distributed.DistributedSampler(
    test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
)
test_loader = torch.utils.data.DataLoader(test_set, batch_size=64, sampler=test_sampler)

model = Net().to(device)
# By Horovod's custom the learning rate grows with the number of ranks, but for Adasum.
lr = options.base_lr * (1 if options.use_adasum else hvd.size())
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if options.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
scaler = torch.amp.GradScaler(device.type)


def train(epoch: int) -> float:
    model.train()
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=half):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        if options.use_adasum:
            scaler.step(optimizer)  # Adasum combines steps: there is nothing to wait for before
        else:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        scaler.update()
        total += loss.detach().cpu()
    return float(hvd.allreduce(total / len(loader), name="loss"))


def test() -> float:
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for images, labels in test_loader:
            found = model(images.to(device)).argmax(1).cpu()
            right += torch.tensor([float((found == labels).sum()), float(len(labels))])
    right = hvd.allreduce(right, op=hvd.Sum, name="accuracy")
    return float(right[0] / right[1])


for epoch in range(options.epochs):
    loss = train(epoch)
    scheduler.step()
    accuracy = test()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.3f}", flush=True)
