"""Progress for log files, where a bar would leave thousands of lines."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only


class LineProgress(Callback):
    """Prints one line now and then, on rank 0: step, what is logged with `prog_bar=True`, time.

    Args:
        every_n_steps: optimizer steps between two lines.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self.every_n_steps = every_n_steps
        self._start = 0.0
        self._printed = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._printed:
            self._printed = step
            self._print(trainer, f"step {step:>6}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._print(trainer, "held-out   ", only="val_")

    @rank_zero_only
    def _print(self, trainer: Trainer, head: str, only: str = "") -> None:
        seconds = int(time.perf_counter() - self._start)
        values = [
            f"{name} {value:.3f}"
            for name, value in trainer.progress_bar_metrics.items()
            if isinstance(value, float) and name.startswith(only) and (only or not name.startswith("val_"))
        ]
        print(f"{seconds // 60:>3}:{seconds % 60:02}  {head}  " + "  ".join(values), flush=True)
