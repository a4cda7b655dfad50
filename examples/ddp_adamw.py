"""torch's AdamW with gradients of 4 bits on the wire:   torchrun --nproc-per-node 2 examples/ddp_adamw.py"""

import os

import torch
import torch.distributed as dist
from torch import nn

import onebit


def main(steps: int = 200) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)

    ddp = nn.parallel.DistributedDataParallel(model)
    compression = onebit.compress_gradients(ddp, bits=4)  # the only line that differs
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

    data = torch.Generator().manual_seed(dist.get_rank())
    weights = torch.linspace(-0.2, 0.2, 64)
    for _ in range(steps):
        x = torch.randn(64, 64, generator=data)
        y = torch.sin(x @ weights).unsqueeze(1)
        loss = nn.functional.mse_loss(ddp(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    report = compression.report()
    if dist.get_rank() == 0:
        print(
            f"loss {loss.item():.4f}; sent {report.sent:,.0f} bytes where a fp32 ring sends {report.sent_by_fp32:,.0f}"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
