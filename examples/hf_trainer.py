"""1-bit Adam in the Trainer of HuggingFace:   torchrun --nproc-per-node 2 examples/hf_trainer.py

A small BERT learns from scratch to tell whether a line holds more of one word than of another. Needs `pip install
transformers accelerate`; nothing is downloaded.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import onebit
from onebit.integrations.transformers import OneBitTrainer


class Lines(Dataset):
    """Random words; the label says whether word 1 comes more often than word 2."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.randint(1, 12, (24,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": int((words == 1).sum() > (words == 2).sum())}


def main(steps: int = 200, warmup: int = 60) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForSequenceClassification(BertConfig(vocab_size=12, num_labels=2, max_position_embeddings=24, **size))
    optimizer = onebit.OneBitAdam(model.parameters(), lr=2e-3, betas=(0.9, 0.98), freeze_step=warmup)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, logging_steps=50, save_steps=100, report_to=[],
            use_cpu=not torch.cuda.is_available(), disable_tqdm=True, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = OneBitTrainer(model, arguments, train_dataset=Lines(), optimizers=(optimizer, schedule))
        trainer.train()  # resume_from_checkpoint=True goes on from the last of its checkpoints, bit for bit

    if trainer.is_world_process_zero():
        loss = next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)
        elements, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
        dense = 2 * (ranks - 1) / ranks * 4 * elements * (steps - warmup)
        print(f"loss {float(loss):.4f}; sent {optimizer.wire_bytes:,} bytes where a fp32 ring sends {dense:,.0f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
