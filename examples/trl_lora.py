"""1-bit Adam in the SFTTrainer of trl, with LoRA of peft:   torchrun --nproc-per-node 2 examples/trl_lora.py

The adapters of a small random Llama learn to count, from any number on. Needs `pip install '.[lora]'`; nothing is
downloaded.
"""

import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import onebit
from onebit.integrations.transformers import OneBitTrainer

NUMBERS, LENGTH = 16, 48


class LoraTrainer(OneBitTrainer, SFTTrainer):
    """SFTTrainer with an optimizer of onebit."""


def main(steps: int = 200, warmup: int = 60) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=NUMBERS + 1, max_position_embeddings=LENGTH, **size))
    words = {"<pad>": NUMBERS} | {str(number): number for number in range(NUMBERS)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), pad_token="<pad>")
    lines = [[(first + i) % NUMBERS for i in range(LENGTH)] for first in range(NUMBERS)] * 256

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, max_steps=steps, per_device_train_batch_size=8, warmup_steps=20, logging_steps=50, save_steps=100,
            report_to=[], use_cpu=not torch.cuda.is_available(), bf16=False, disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = LoraTrainer(
            model, arguments, train_dataset=Dataset.from_dict({"input_ids": lines}), processing_class=tokenizer,
            peft_config=LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"]),
            optimizer_cls_and_kwargs=(onebit.OneBitAdam, {"lr": 5e-3, "betas": (0.9, 0.98), "freeze_step": warmup}),
        )  # fmt: skip
        trainer.train()  # builds the optimizer, of the parameters that train; resume_from_checkpoint=True goes on

    if trainer.is_world_process_zero():
        loss = next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)
        elements, ranks = sum(p.numel() for p in model.parameters() if p.requires_grad), dist.get_world_size()
        dense = 2 * (ranks - 1) / ranks * 4 * elements * (steps - warmup)
        sent = trainer.optimizer.optimizer.wire_bytes
        print(f"loss {float(loss):.4f}; sent {sent:,} bytes where a fp32 ring sends {dense:,.0f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
