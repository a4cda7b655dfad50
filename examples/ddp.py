"""0/1 Adam under DistributedDataParallel:   torchrun --nproc-per-node 2 examples/ddp.py [FOLDER]

With a folder that all ranks see, the run is saved every 100 steps; started again, it goes on from the last checkpoint.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import onebit


def main(folder: Path | None, steps: int = 300) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    )

    optimizer = onebit.ZeroOneAdam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    onebit.attach(model, optimizer)  # with the optimizer, all that 1-bit messages need

    saved = sorted(folder.glob("step-*/checkpoint.json")) if folder else []
    done = onebit.load(saved[-1].parent, model, optimizer)["step"] if saved else 0
    data, loss = torch.Generator(), torch.zeros(())
    for step in range(done, steps):
        data.manual_seed(step * dist.get_world_size() + dist.get_rank())  # the batch follows from the step and the rank
        x = torch.randn(64, 64, generator=data)
        y = torch.sin(x @ torch.linspace(-0.2, 0.2, 64)).unsqueeze(1)
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if folder and (step + 1) % 100 == 0:
            onebit.save(folder / f"step-{step + 1:09}", model, optimizer, extra={"step": step + 1})

    if dist.get_rank() == 0 and done >= steps:
        print(f"the run in {folder} is finished, after {done} steps: for a new one remove the folder or name another")
    elif dist.get_rank() == 0:
        found = optimizer.report().numbers()
        sent, dense = found["onebit/sent_bytes"], found["onebit/sent_bytes_by_fp32"]
        print(f"loss {loss.item():.4f}; sent {sent:,.0f} bytes where a fp32 ring sends {dense:,.0f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
