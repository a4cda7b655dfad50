"""1-bit Adam under DistributedDataParallel:   torchrun --nproc-per-node 2 examples/ddp_adam.py"""

import os

import torch
import torch.distributed as dist
from torch import nn

import onebit


def main(steps: int = 300, warmup: int = 60) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    )

    optimizer = onebit.OneBitAdam(model.parameters(), lr=2e-3, betas=(0.9, 0.98), freeze_step=warmup)
    onebit.attach(model, optimizer)  # the only two lines that differ

    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(64, 64, generator=data)
        y = torch.sin(x @ torch.linspace(-0.2, 0.2, 64)).unsqueeze(1)
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    elements, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    dense = 2 * (ranks - 1) / ranks * 4 * elements * (steps - warmup)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}; sent {optimizer.wire_bytes:,} bytes where a fp32 ring sends {dense:,.0f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
