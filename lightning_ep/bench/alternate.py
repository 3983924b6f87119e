"""Matched comparisons inside one run: the same model, data and process, the modes taking turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_ep.profiling.readers import read_trace
from lightning_ep.profiling.report import OverlapReport, overlap_report


@dataclass(frozen=True)
class Mode:
    """What is switched between the turns."""

    name: str
    overlap: bool
    delay_wgrad: bool


MODES = (Mode("no overlap", False, False), Mode("1f1b", True, False), Mode("1f1b + delayed wgrad", True, True))


@dataclass
class Measured:
    """One mode's results. Times in ms a step (all micro-batches and the optimizer), memory in bytes."""

    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    report: OverlapReport | None = None
    gradients: torch.Tensor | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)


class Alternate(pl.Callback):
    """Times whole training steps of each mode, in turns of `WARM + TIMED` steps, and profiles one step of each.

    Needs a CUDA device and `EPOverlapStrategy`. A step runs from the first micro-batch's start to the optimizer's end,
    synchronised on both sides; `host_ms` is when the host was done with launching it.
    """

    WARM, TIMED = 1, 2

    def __init__(self, micro_batches: int, rounds: int, modes: tuple[Mode, ...] = MODES) -> None:
        self.micro_batches, self.rounds, self.modes = micro_batches, rounds, modes
        self.measured = {mode.name: Measured() for mode in modes}
        self._profile: torch.profiler.profile | None = None

    @property
    def num_batches(self) -> int:
        """Micro-batches that the whole comparison takes: the first turn of each mode profiles one step more."""
        return self.micro_batches * len(self.modes) * (self.rounds * (self.WARM + self.TIMED) + 1)

    def _turn(self, step: int) -> tuple[Mode, int, bool]:
        """(mode, number within its turn, whether the step is profiled)."""
        length = self.WARM + self.TIMED
        first = len(self.modes) * (length + 1)
        if step < first:
            turn, nth = divmod(step, length + 1)
            return self.modes[turn], nth, nth == length
        turn, nth = divmod(step - first, length)
        return self.modes[turn % len(self.modes)], nth, False

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        step, micro = divmod(batch_idx, self.micro_batches)
        if micro:
            return
        self.mode, self.nth, profiled = self._turn(step)
        if self.nth == 0:
            strategy = trainer.strategy
            changed = {
                "overlap_moe_expert_parallel_comm": self.mode.overlap,
                "delay_wgrad_compute": self.mode.delay_wgrad,
            }
            strategy.use(replace(strategy.config, **changed))
            torch.cuda.reset_peak_memory_stats()
        if dist.get_world_size() > 1:
            dist.barrier()
        torch.cuda.synchronize()
        if profiled:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
        self._started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        measured = self.measured[self.mode.name]
        if measured.gradients is None:
            measured.gradients = torch.cat([p.grad.flatten()[:2000].float() for p in module.parameters()])

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if (args[-1] + 1) % self.micro_batches:
            return
        host = time.perf_counter() - self._started
        torch.cuda.synchronize()
        took = time.perf_counter() - self._started
        measured = self.measured[self.mode.name]
        if self._profile is not None:
            self._profile.stop()
            measured.report = _report(self._profile)
            self._profile = None
        elif self.nth >= self.WARM:
            measured.step_ms.append(took * 1e3)
            measured.host_ms.append(host * 1e3)
        measured.peak_bytes = torch.cuda.max_memory_allocated()


def _report(profile: torch.profiler.profile) -> OverlapReport:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return overlap_report(read_trace(path)[0])
