"""A job as a user would write it, started by different launchers: fit, validate, test, predict.

Rank 0 prints one line of JSON with what came out. No transformers: imports are most of a launch.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy, MoELayer

SAMPLES = 16


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = None

    def configure_model(self) -> None:
        if self.layers is not None:  # Lightning calls it again for every validate, test and predict
            return
        with torch.device("meta"):
            self.layers = nn.Sequential(nn.Linear(8, 16), MoELayer(16, 32, 4, 2), nn.Linear(16, 8))

    def loss(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x.roll(1, -1)).square().mean()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(x)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(x), sync_dist=True)

    def test_step(self, x: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(x), sync_dist=True)

    def predict_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.layers(x).mean((1, 2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader:
    samples = torch.randn(SAMPLES, 6, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(list(samples), batch_size=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--by-name", action="store_true", help="the strategy's registered name instead of an object")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    strategy: Any = "ep_overlap" if args.by_name else EPOverlapStrategy(expert_model_parallel_size=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=args.devices, num_nodes=args.num_nodes, strategy=strategy, max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Regression()
    (before,) = trainer.validate(module, data(), verbose=False)
    trainer.fit(module, data(), data())
    train_loss = trainer.callback_metrics["train_loss"].item()
    (after,) = trainer.validate(module, data(), verbose=False)
    (tested,) = trainer.test(module, data(), verbose=False)
    predictions = torch.cat(trainer.predict(module, data()))
    assert trainer.strategy.mesh is not None
    if trainer.is_global_zero:
        found = {
            "environment": type(trainer.strategy.cluster_environment).__name__,
            "world_size": trainer.world_size,
            "num_nodes": trainer.num_nodes,
            "ep_size": trainer.strategy.mesh.ep_size,
            "local_experts": module.layers[1].experts.num_experts,
            "losses": [before["val_loss"], train_loss, after["val_loss"], tested["test_loss"]],
            "predictions": predictions.tolist(),
        }
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
