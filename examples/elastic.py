"""Training that goes on when a host dies. On every host, HOST being the address of the first one:

    torchrun --nnodes 3 --node-rank 0 --master-addr HOST --master-port 29500 examples/elastic.py

Then stop or kill any of the processes, or pull a cable: the others say who is gone, and go on. On one machine start the
three commands in three terminals, with --master-addr 127.0.0.1.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import onebit


def main(steps: int = 1500, warmup: int = 60) -> None:
    dist.init_process_group("gloo")  # on a GPU, too: no other backend lets a Heartbeat end its waits
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    optimizer = onebit.OneBitAdam(model.parameters(), lr=2e-3, betas=(0.9, 0.98), freeze_step=warmup, elastic=True)
    heart = onebit.Heartbeat(silent_after=5.0)

    data, loss, changed, ended = torch.Generator(), torch.zeros(()), False, False
    while not ended:
        try:
            if changed:
                onebit.reform(optimizer, dist.group.WORLD)
                changed = False
                print(f"going on after step {optimizer.steps} with {dist.get_world_size()} ranks", flush=True)
            if (step := optimizer.tried_steps) == steps:
                dist.barrier()  # nobody leaves before all have come to the end
                ended = True
                continue
            optimizer.zero_grad()
            data.manual_seed(step * 100 + dist.get_rank())  # the batch follows from the step and the rank
            x = torch.randn(64, 64, generator=data)
            y = torch.sin(x @ torch.linspace(-0.2, 0.2, 64)).unsqueeze(1)
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            if step % 500 == 0 and dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
        except RuntimeError as error:  # a CollectiveError, or the barrier's
            print(error, flush=True)
            heart.regroup()  # ends this process where too few are left
            changed = True

    elements, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    dense = 2 * (ranks - 1) / ranks * 4 * elements * (steps - warmup)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}; sent {optimizer.wire_bytes:,} bytes where a fp32 ring sends {dense:,.0f}")
    heart.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
