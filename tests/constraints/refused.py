"""Run by test_refusal.py as a program of two ranks: a fit whose configuration is wrong in several ways."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy
from lightning_ep.constraints import enforce, gather_facts
from tests.constraints.models import TinyQwen


class Checked(EPOverlapStrategy):
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        enforce(gather_facts(self.config, self.lightning_module.trainer, self.lightning_module))
        super().setup_environment()


def main() -> None:
    model = TinyQwen(num_experts=7, late=True, mtp_layers=2)

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        state = f"groups={dist.is_initialized()} weights={hasattr(model, 'model')}"
        print(f"rank {os.environ.get('LOCAL_RANK', '0')}: {kind.__name__} {state}", file=sys.stderr)
        traceback.print_exception(kind, error, trace)

    sys.excepthook = report
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=1,
        strategy=Checked(expert_model_parallel_size=2, overlap_moe_expert_parallel_comm=True),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(torch.zeros(4, 8, dtype=torch.long), batch_size=1))


if __name__ == "__main__":
    main()
