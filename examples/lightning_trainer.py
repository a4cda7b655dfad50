"""1-bit Adam in the Trainer of Lightning:   torchrun --nproc-per-node 2 examples/lightning_trainer.py

Needs `pip install lightning`.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import onebit
from onebit.integrations.lightning import OneBitCallback


class Waves(Dataset):
    def __len__(self) -> int:
        return 40_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return x, torch.sin(x @ torch.linspace(-0.2, 0.2, 64)).unsqueeze(0)


class Module(LightningModule):
    def __init__(self, warmup: int) -> None:
        super().__init__()
        self.warmup, self.loss = warmup, 0.0
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> onebit.OneBitAdam:
        return onebit.OneBitAdam(self.parameters(), lr=2e-3, betas=(0.9, 0.98), freeze_step=self.warmup)


def main(steps: int = 200, warmup: int = 60) -> None:
    module, ranks = Module(warmup), int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="auto" if torch.cuda.is_available() else "cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            num_nodes=ranks // int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_steps=steps,
            callbacks=[OneBitCallback()], logger=False, default_root_dir=folder, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Waves(), batch_size=64))  # ckpt_path= goes on from one of its checkpoints

    elements = sum(p.numel() for p in module.parameters())
    dense = 2 * (ranks - 1) / ranks * 4 * elements * (steps - warmup)
    if trainer.is_global_zero:
        sent = trainer.optimizers[0].wire_bytes
        print(f"loss {float(module.loss):.4f}; sent {sent:,} bytes where a fp32 ring sends {dense:,.0f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
