"""Hybrid-sharded training with compressed gradients between nodes: a small classifier learns what another one says.

    torchrun --nproc-per-node 4 examples/fsdp.py --codec eden

Two "nodes" of two ranks each: a node's ranks share the model, and nodes hold replicas. Without `compress_fsdp` and with
`mesh` in the place of `mesh["shard"]` this is PyTorch's own HSDP.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from gradwire import EDEN, TopK, compress_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CODECS = {"eden": EDEN(), "topk": TopK(density=0.05)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", choices=CODECS, default="eden")
    parser.add_argument("--exchange", choices=["auto", "gather", "two_pass", "split"], default="auto")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shards = 2
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (world // shards, shards), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    teacher = nn.Linear(64, 10).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    # Between nodes leave out `fallback`: on one machine "auto" finds the network fast, and would send float32.
    state = compress_fsdp(
        model, CODECS[options.codec], mesh=mesh["replicate"], exchange=options.exchange, fallback=None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    for step in range(options.steps):
        x = torch.randn(64, 64, generator=generator, device=device)
        loss = F.cross_entropy(model(x), teacher(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {mean.item() / world:.3f}")

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict(), "compression": state}, checkpoint_id=folder[0])
    dcp.load({"model": model.state_dict(), "compression": state}, checkpoint_id=folder[0])

    bits = b"".join(p.to_local().detach().cpu().contiguous().numpy().tobytes() for p in model.parameters())
    said: list[str] = [""] * world
    dist.all_gather_object(said, hashlib.sha256(bits).hexdigest())
    if dist.get_rank() == 0:
        print("replicas are equal" if said[:shards] == said[-shards:] else "replicas differ")
        print(f"{state.statistics().bytes_sent} bytes sent, {state.statistics().dense_bytes} as float32")
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
