"""Fine-tune a Hugging Face MoE checkpoint and write it back as one.

    python examples/finetune_checkpoint.py --checkpoint path/to/Qwen3-30B-A3B --text some/folder --devices 8 --ep 8

Each rank reads the dense weights and its own experts, nothing else. The result loads with
`AutoModelForCausalLM.from_pretrained("runs/finetuned")`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ep import EPOverlapStrategy, export_pretrained, from_pretrained
from lightning_ep.recipes import TextFolder


class FineTuned(pl.LightningModule):
    def __init__(self, checkpoint: str, lr: float) -> None:
        super().__init__()
        self.checkpoint, self.lr = checkpoint, lr
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            dtype = torch.get_default_dtype()  # Lightning sets it by the Trainer's precision
            self.model = from_pretrained(self.checkpoint, dtype=dtype, use_cache=False).train()

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=ids, labels=ids).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="folder or Hub name of a safetensors checkpoint")
    parser.add_argument("--text", required=True, help="a folder of text files")
    parser.add_argument("--tokenizer", help='default: the checkpoint\'s; "bytes" for a model of bytes')
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--ep", type=int, default=8, help="expert_model_parallel_size")
    parser.add_argument("--out", default="runs/finetuned", help="a new folder for the Hugging Face checkpoint")
    args = parser.parse_args()
    if Path(args.out).exists():
        parser.error(f"--out {args.out} exists; choose a new folder")

    pl.seed_everything(0)
    trainer = pl.Trainer(
        devices=args.devices,
        precision="bf16-true" if torch.cuda.is_available() else "32-true",
        strategy=EPOverlapStrategy(expert_model_parallel_size=args.ep),
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        max_steps=args.max_steps,
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    tokenizer = None if args.tokenizer == "bytes" else args.tokenizer or args.checkpoint
    data = TextFolder(args.text, "**/*", args.seq_length, args.micro_batch_size, tokenizer=tokenizer)
    module = FineTuned(args.checkpoint, args.lr)
    trainer.fit(module, data)
    trainer.validate(module, data)
    export_pretrained(module, args.out)  # on every rank


if __name__ == "__main__":
    main()
