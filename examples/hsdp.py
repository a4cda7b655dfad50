"""1-bit Adam on a sharded model: shards inside a node, 1 bit between nodes.

torchrun --nproc-per-node 4 examples/hsdp.py           two "nodes" of two ranks on one machine
torchrun --nnodes 2 --nproc-per-node 8 ... --shards 8  real ones
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import onebit


def main(steps: int = 150, warmup: int = 60) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=2, help="ranks of a node")
    shards = parser.parse_args().shards
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    nodes = dist.get_world_size() // shards
    mesh = init_device_mesh(device, (nodes, shards), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1)).to(device)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh["shard"])
        if device == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no average

    optimizer = onebit.OneBitAdam(
        model.parameters(), lr=2e-3, betas=(0.9, 0.98), freeze_step=warmup, process_group=mesh.get_group("replicate")
    )
    onebit.attach(model, optimizer)

    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(64, 64, generator=data)
        y = torch.sin(x @ torch.linspace(-0.2, 0.2, 64)).unsqueeze(1)
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    elements = sum(p.to_local().numel() for p in model.parameters())
    dense = 2 * (nodes - 1) / nodes * 4 * elements * (steps - warmup)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}; sent {optimizer.wire_bytes:,} bytes where a fp32 ring sends {dense:,.0f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
