"""Pre-train a Qwen3-MoE from scratch on a folder of text.

    python examples/pretrain_qwen3_moe.py --devices 2 --ep 2 --max-steps 50                      # tiny, on a CPU too
    torchrun --nproc-per-node=8 examples/pretrain_qwen3_moe.py --model 30b --devices 8 --ep 8 \\
        --text some/folder --tokenizer Qwen/Qwen3-30B-A3B

examples/launch/ has the same for several nodes.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lightning_ep import EPOverlapStrategy
from lightning_ep.recipes import TextFolder

MODELS = {
    "tiny": {
        "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    },
    "30b": {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}  # fmt: skip


class Qwen3Moe(pl.LightningModule):
    def __init__(self, size: str, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config = Qwen3MoeConfig(**MODELS[size], norm_topk_prob=True, output_router_logits=True, use_cache=False)
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:  # Lightning calls this for fit, validate and test
            with torch.device("meta"):  # no rank ever holds all experts: the strategy allocates its own
                self.model = AutoModelForCausalLM.from_config(self.config)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        out = self.model(input_ids=ids, labels=ids)  # the loss includes the router's auxiliary loss
        self.log_dict({"loss": out.loss, "aux_loss": out.aux_loss}, prog_bar=True)
        return out.loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=ids, labels=ids).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), weight_decay=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--text", help="a folder of text files; default: Python's standard library")
    parser.add_argument("--tokenizer", help="name or folder; default: bytes")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--ep", type=int, default=2, help="expert_model_parallel_size")
    parser.add_argument("--resume", help='a checkpoint, or "last"')
    args = parser.parse_args()

    pl.seed_everything(0)
    trainer = pl.Trainer(
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision="bf16-true" if torch.cuda.is_available() else "32-true",
        strategy=EPOverlapStrategy(expert_model_parallel_size=args.ep),
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        max_steps=args.max_steps,
        val_check_interval=min(500, args.max_steps) * args.accumulate,
        check_val_every_n_epoch=None,
        callbacks=[ModelCheckpoint("runs/qwen3_moe", monitor="val_loss", save_last=True)],
        log_every_n_steps=10,
    )
    data = TextFolder(args.text, "**/*", args.seq_length, args.micro_batch_size, tokenizer=args.tokenizer)
    trainer.fit(Qwen3Moe(args.model, args.lr), data, ckpt_path=args.resume)


if __name__ == "__main__":
    main()
