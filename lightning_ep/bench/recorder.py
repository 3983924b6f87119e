"""StepRecorder: what `lightning-ep ab` wants to know of a run, written by the run itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_ep.callbacks.step_clock import StepClock, flops_of, peak_memory, tokens_of


class StepRecorder(pl.Callback):
    """Times every optimizer step without waiting for the GPU; writes one JSON file at the end of fit (global rank 0).

    The file has `step_seconds` (one value a step, from the second on; the first step compiles and allocates),
    `tokens_per_step` and `flops_per_step` (of all ranks, null where unknown), `peak_memory_bytes` (largest over ranks),
    `world_size`, `precision`, `device` and `versions`. While training runs, `<path>.progress` holds the number of steps done.

    Args:
        path: the JSON file to write.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._clock = StepClock(module.device)
        self._global_step = trainer.global_step
        self._tokens = self._step_tokens = self._length = 0
        self._progress = None
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._progress = Path(f"{self.path}.progress").open("w")  # noqa: SIM115  closed in teardown

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (found := tokens_of(batch)) is not None:
            self._tokens, self._length = self._tokens + found[0], max(self._length, found[1])
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._clock.tick()
        self._step_tokens, self._tokens = self._tokens, 0
        if self._progress is not None:
            self._progress.seek(0)
            self._progress.write(f"{trainer.global_step}\n")
            self._progress.flush()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        seconds = self._clock.take(wait=True)
        peak = torch.tensor(float(peak_memory(module.device)), dtype=torch.float64, device=module.device)
        if trainer.world_size > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if not trainer.is_global_zero:
            return
        tokens = self._step_tokens * trainer.world_size or None
        per_token = flops_of(module, self._length) if tokens else None
        cuda = module.device.type == "cuda"
        record = {
            "step_seconds": seconds,
            "tokens_per_step": tokens,
            "flops_per_step": tokens * per_token if tokens and per_token else None,
            "peak_memory_bytes": int(peak.item()),
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
            "device": torch.cuda.get_device_name(module.device) if cuda else "CPU",
            "versions": {"torch": torch.__version__, "lightning": pl.__version__, "cuda": torch.version.cuda},
        }
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
        os.replace(partial, self.path)

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if (progress := getattr(self, "_progress", None)) is not None:
            progress.close()
