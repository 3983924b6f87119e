"""A hand-written MoE language model: `MoELayer` in the place of the feed-forward layer, the rest is plain PyTorch.

python examples/own_moe_module.py --devices 2 --ep 2 --max-steps 100        # on a CPU too
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ep import EPOverlapStrategy, MoELayer
from lightning_ep.recipes import TextFolder


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, num_experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.moe = MoELayer(hidden, intermediate_size=2 * hidden, num_experts=num_experts, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm_2(x))


class ByteModel(pl.LightningModule):
    def __init__(
        self, hidden: int = 128, layers: int = 4, heads: int = 4, num_experts: int = 8, length: int = 128
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, num_experts) for _ in range(layers))
        self.head = nn.Linear(hidden, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(ids)
        balance = torch.stack([block.moe.aux_loss for block in self.blocks]).mean()  # 1.0 when experts are used evenly
        self.log_dict({"loss": loss, "balance": balance}, prog_bar=True)
        return loss + 0.01 * balance

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(ids), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a folder of text files; default: Python's standard library")
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--ep", type=int, default=2, help="expert_model_parallel_size")
    args = parser.parse_args()

    pl.seed_everything(0)
    trainer = pl.Trainer(
        devices=args.devices,
        accelerator="auto" if torch.cuda.device_count() >= args.devices else "cpu",
        strategy=EPOverlapStrategy(expert_model_parallel_size=args.ep),
        max_steps=args.max_steps,
        val_check_interval=args.max_steps,
        check_val_every_n_epoch=None,
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    trainer.fit(ByteModel(), TextFolder(args.text, seq_length=128, micro_batch_size=8))


if __name__ == "__main__":
    main()
