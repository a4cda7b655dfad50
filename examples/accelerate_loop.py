"""1-bit Adam in a loop with Accelerate:   torchrun --nproc-per-node 2 examples/accelerate_loop.py

It ends after 100 steps of 300, and goes on from what it has saved. Needs `pip install accelerate`.
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

import onebit
from onebit.integrations.accelerate import attach


def train(accelerator: Accelerator, folder: str, first: int, last: int, warmup: int) -> tuple[float, int, int]:
    """Train from step `first`, and what was saved there, to step `last`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = onebit.OneBitAdam(model.parameters(), lr=2e-3, betas=(0.9, 0.98), freeze_step=warmup)
    model, prepared = accelerator.prepare(model, optimizer)
    attach(accelerator, model, prepared)  # save_state then calls prepared.synchronize()
    if first:
        accelerator.load_state(folder)

    loss = torch.zeros(())
    for step in range(first, last):
        data = torch.Generator().manual_seed(1_000 * step + accelerator.process_index)
        x = torch.randn(64, 64, generator=data)
        y = torch.sin(x @ torch.linspace(-0.2, 0.2, 64)).unsqueeze(1)
        loss = nn.functional.mse_loss(model(x.to(accelerator.device)), y.to(accelerator.device))
        prepared.zero_grad()
        accelerator.backward(loss)
        prepared.step()
    accelerator.save_state(folder)
    accelerator.free_memory()
    return loss.item(), optimizer.wire_bytes, sum(p.numel() for p in model.parameters())


def main(steps: int = 300, interrupted: int = 100, warmup: int = 60) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_object_list([own])[0]  # one that all ranks see
        train(accelerator, folder, 0, interrupted, warmup)
        loss, sent, elements = train(accelerator, folder, interrupted, steps, warmup)
        accelerator.wait_for_everyone()

    ranks = accelerator.num_processes
    dense = 2 * (ranks - 1) / ranks * 4 * elements * (steps - warmup)
    if accelerator.is_main_process:
        print(f"loss {loss:.4f}; sent {sent:,} bytes where a fp32 ring sends {dense:,.0f}")
    accelerator.wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
