"""A small regression that any strategy trains the same, with steps of its own choosing."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, STEPS = 4, 8


class Rows(Dataset):
    """Row i depends on i alone."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(i))


class Regression(pl.LightningModule):
    def __init__(self, change_at: int | None = None, change: float = 1e-3, no_loss_at: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.change_at, self.change, self.no_loss_at = change_at, change, no_loss_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        if batch_idx in self.no_loss_at:
            return None
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        return loss

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == self.change_at:
            with torch.no_grad():
                self.net[2].weight[0, 0] += self.change

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SkipTo:
    """Batches in a fixed order; a resumed run starts where the other one stopped."""

    def __init__(self, batch_size: int, skip: int = 0) -> None:
        self.batch_size, self.skip = batch_size, skip

    def __iter__(self):
        rows = Rows()
        for start in range(self.skip * self.batch_size, len(rows) - self.batch_size + 1, self.batch_size):
            yield torch.stack([rows[i] for i in range(start, start + self.batch_size)])


def fit(
    root,
    *callbacks: pl.Callback,
    module: pl.LightningModule | None = None,
    seed: int = 7,
    batch_size: int = BATCH,
    loader=None,
    ckpt_path=None,
    **kwargs,
) -> pl.Trainer:
    seed_everything(seed, verbose=False)
    options = dict(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False, barebones=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(root), callbacks=list(callbacks),
    )  # fmt: skip
    trainer = pl.Trainer(**options | kwargs)
    world = trainer.world_size
    if loader is None and world > 1:
        sampler = DistributedSampler(Rows(), world, torch.distributed.get_rank(), shuffle=False)
        loader = DataLoader(Rows(), batch_size, sampler=sampler)
    trainer.fit(module or Regression(), loader or DataLoader(Rows(), batch_size), ckpt_path=ckpt_path)
    return trainer
