"""Run by test_refusal.py as a program of two ranks: a fit whose configuration is wrong, in the way its argument says.

early: known before the model is built. late: its 7 experts are seen only once `configure_model` built them.
rank1: wrong on one of the ranks alone.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy, MoELayer
from tests.constraints.models import TinyQwen


class LateExperts(pl.LightningModule):
    """Says nothing of its experts before `configure_model`."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = MoELayer(16, 24, 7, 2)

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        raise AssertionError("trained")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(way: str) -> None:
    rank = os.environ.get("LOCAL_RANK", "0")
    wrong = way == "early" or rank == "1"
    model = LateExperts() if way == "late" else TinyQwen(7 if wrong else 8, late=True, mtp_layers=2 if wrong else 0)

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        allocated = any(not p.is_meta for p in model.parameters())
        state = f"default group={dist.is_initialized()} built={hasattr(model, 'model')} {allocated=}"
        # In one piece: the ranks share one pipe.
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(f"rank {rank}: {kind.__name__} {state}\n{text}")

    sys.excepthook = report
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=1,
        precision="bf16-true",
        strategy=EPOverlapStrategy(expert_model_parallel_size=2, overlap_moe_expert_parallel_comm=True),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(torch.zeros(4, 8, dtype=torch.long), batch_size=1))


if __name__ == "__main__":
    main(sys.argv[1])
