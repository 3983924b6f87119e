"""LossParity: records what a run does, step by step, and compares it with a recorded baseline."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_ep.callbacks.parity import (
    Parity,
    ParityReport,
    StepRecord,
    header_differences,
    read_run,
    tolerance_for,
)

log = logging.getLogger(__name__)


@dataclass
class _Pending:
    """A step whose numbers are still on the device, maybe still being reduced."""

    step: int
    lr: list[float | Tensor]
    numbers: Tensor  # [loss sum, losses, non-finite losses, skips, gradient norm, norms], summed over ranks
    work: Any

    def ready(self) -> bool:
        return self.work is None or self.work.is_completed()


class LossParity(pl.Callback):
    """Writes one JSON line for each optimizer step and, with a baseline, says where the two runs part.

    Recorded: the loss (mean over the window's micro-batches and over ranks), learning rates, gradient norm (before
    clipping), whether the step was skipped (float16's loss scaling, or no micro-batch had a loss), and whether its
    losses were finite. One writer (global rank 0). Numbers stay on the device and are read every `flush_every` steps,
    at checkpoints and at the end. A resumed run goes on in the same file; what was written after the checkpoint is
    dropped.

    Works with any strategy that replicates parameters, and with `EPOverlapStrategy`, whose norm counts all experts.
    Logs no metric; `report` holds the comparison, and its outcome is printed at the end of fit.

    Args:
        path: the file to write; `losses.jsonl` in the Trainer's `default_root_dir` by default. A file of an earlier
            run is kept beside it as `*.previous.jsonl`.
        baseline: a file that an earlier run wrote.
        tolerance: allowed relative deviation of a step's loss; by default from the precision of both runs
            (`lightning_ep.callbacks.parity.TOLERANCES`). The gradient norm gets ten times as much.
        on_divergence: "warn" once, "raise" RuntimeError, or "stop" training cleanly; the same on every rank.
        flush_every: optimizer steps between two readings: the longest delay of a warning, and of the file.

    Raises:
        ValueError: at the start of fit, when the runs have different lengths, seeds or batch sizes (it says which), or
            the baseline is no recorded run.
    """

    def __init__(
        self,
        path: str | None = None,
        baseline: str | None = None,
        tolerance: float | None = None,
        on_divergence: Literal["warn", "raise", "stop"] = "warn",
        flush_every: int = 10,
    ) -> None:
        if on_divergence not in ("warn", "raise", "stop"):
            raise ValueError(f"on_divergence={on_divergence!r} is not a choice; use 'warn', 'raise' or 'stop'")
        if flush_every < 1:
            raise ValueError(f"flush_every={flush_every} is not a number of steps; set it to 1 or more")
        self.path, self.baseline, self.tolerance = path, baseline, tolerance
        self.on_divergence, self.flush_every = on_divergence, flush_every
        self.report: ParityReport | None = None
        self._parity: Parity | None = None
        self._reacted = False
        self._file: TextIO | None = None
        self._pending: list[_Pending] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        path = Path(self.path or os.path.join(trainer.default_root_dir, "losses.jsonl"))
        header = run_header(trainer)
        self.report, self._parity, self._reacted, self._pending = None, None, False, []
        # Rank 0 touches files; all ranks learn the outcome, so that each can decide alone and all decide the same.
        self._parity = _agreed(trainer, lambda: self._load_baseline(header, path))
        _agreed(trainer, lambda: self._open(path, header, trainer.global_step))
        self._global_step = trainer.global_step
        self._start_window(module)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # Before the step: schedulers have moved on when the batch ends.
        self._lr = [group["lr"] for o in trainer.optimizers for group in o.param_groups]
        self._scale = _loss_scale(trainer)
        if not _clips_through_strategy(trainer):
            self._norm = _grad_norm(trainer, optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (loss := _loss_of(outputs)) is not None:
            if module.automatic_optimization:
                loss = loss * trainer.accumulate_grad_batches  # Lightning divided it for the backward
            finite = loss.isfinite()
            self._losses += torch.stack((torch.where(finite, loss, 0), torch.ones_like(loss), (~finite).to(loss)))
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._close_window(trainer, module)
            if len(self._pending) >= self.flush_every:
                self._flush()
                self._react(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._flush()  # what a resumed run builds on is on disk

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._flush()
        self._react(trainer)
        if self.report is not None and self.report.ok:
            rank_zero_info(f"Loss parity with {self.baseline}: {self.report}.")

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        # Other ranks may be gone: read only what has arrived.
        arrived = next((i for i, p in enumerate(self._pending) if not p.ready()), len(self._pending))
        self._pending = self._pending[:arrived]
        try:
            self._flush()
        except RuntimeError as error:  # the device itself failed; the exception on its way says more
            log.debug("last losses were lost: %s", error)

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _load_baseline(self, header: dict[str, Any], path: Path) -> Parity | None:
        if self.baseline is None:
            return None
        if Path(self.baseline).resolve() == path.resolve():
            raise ValueError(f"LossParity would overwrite its baseline {self.baseline}; give another path")
        theirs, records = read_run(self.baseline)
        if differing := header_differences(header, theirs):
            raise ValueError(f"LossParity cannot compare with {self.baseline}: {'; '.join(differing)}")
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = tolerance_for(header["precision"], theirs.get("precision"))
        return Parity(records, tolerance)

    def _open(self, path: Path, header: dict[str, Any], step: int) -> None:
        self._file = _open(path, header, step)

    def _start_window(self, module: pl.LightningModule) -> None:
        self._losses = torch.zeros(3, dtype=torch.float64, device=module.device)
        self._lr: list[float | Tensor] = []
        self._scale: float | None = None
        self._norm: Tensor | None = None

    def _close_window(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        scale = _loss_scale(trainer)
        skipped = scale is not None and self._scale is not None and scale < self._scale
        norm = trainer.strategy.last_grad_norm if _clips_through_strategy(trainer) else self._norm
        rest = self._losses.new_tensor((float(skipped), 0.0, 0.0))
        if norm is not None:
            rest[1:] = torch.stack((norm.double().to(rest.device), rest.new_ones(())))
        numbers, work = torch.cat((self._losses, rest)), None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            work = dist.all_reduce(numbers, async_op=True)
        self._pending.append(_Pending(trainer.global_step, self._lr, numbers, work))
        self._start_window(module)

    def _flush(self) -> None:
        """Read, write and compare what is pending: one host read for all of it."""
        if not self._pending:
            return
        for pending in self._pending:
            if pending.work is not None:
                pending.work.wait()
        rows = torch.stack([p.numbers for p in self._pending]).tolist()
        for pending, row in zip(self._pending, rows, strict=True):
            record = _record(pending, row)
            if self._file is not None:
                self._file.write(record.to_line())
            if self._parity is not None:
                self._parity.add(record)
        self._pending = []
        if self._file is not None:
            self._file.flush()
        if self._parity is not None:
            self.report = self._parity.report

    def _react(self, trainer: pl.Trainer) -> None:
        if self.report is None or self.report.ok or self._reacted:
            return
        self._reacted = True
        message = f"Loss parity with {self.baseline}: {self.report}."
        if self.on_divergence == "raise":
            raise RuntimeError(message)
        rank_zero_warn(message)
        if self.on_divergence == "stop":
            trainer.should_stop = True


def run_header(trainer: pl.Trainer) -> dict[str, Any]:
    """What a recorded run says about itself; `MUST_AGREE` names what two runs must share."""
    batch_size = _batch_size(trainer.train_dataloader)
    accumulate = trainer.accumulate_grad_batches
    steps = trainer.estimated_stepping_batches
    seed = os.environ.get("PL_GLOBAL_SEED")
    return {
        "version": 1,
        "seed": int(seed) if seed is not None else None,
        "batch_size": batch_size,
        "accumulate_grad_batches": accumulate,
        "world_size": trainer.world_size,
        "global_batch_size": None if batch_size is None else batch_size * accumulate * trainer.world_size,
        "steps": int(steps) if math.isfinite(steps) else None,
        "precision": str(trainer.precision),
    }


def _agreed(trainer: pl.Trainer, action: Callable[[], Any]) -> Any:
    """`action`'s value on rank 0, given to all; what it raises there, all raise."""
    result: Any = None
    if trainer.is_global_zero:
        try:
            result = action()
        except (ValueError, OSError) as error:
            result = ValueError(f"{error}")
    result = trainer.strategy.broadcast(result)
    if isinstance(result, ValueError):
        raise result
    return result


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _open(path: Path, header: dict[str, Any], step: int) -> TextIO:
    """The file to append to: a fresh one, or what belongs to the checkpoint that training resumes from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"header": header}) + "\n"]
    if path.exists() and path.stat().st_size:
        if step:
            theirs, records = read_run(path)
            if differing := header_differences(header, theirs):
                raise ValueError(f"LossParity cannot resume {path}: {'; '.join(differing)}")
            lines = [json.dumps({"header": theirs}) + "\n"]
            lines += [record.to_line() for _, record in sorted(records.items()) if record.step <= step]
        else:
            os.replace(path, path.with_suffix(f".previous{path.suffix}"))
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)
    return path.open("a", encoding="utf-8")


def _record(pending: _Pending, row: list[float]) -> StepRecord:
    total, count, bad, skips, norm, norms = row
    loss = total / count if count and not bad else None
    return StepRecord(
        step=pending.step,
        loss=loss if loss is None or math.isfinite(loss) else None,
        lr=[float(lr) for lr in pending.lr],
        grad_norm=norm / norms if norms and math.isfinite(norm) else None,
        skipped=bool(skips) or not count,
        finite=not bad,
    )


def _loss_of(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss.detach().double() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _loss_scale(trainer: pl.Trainer) -> float | None:
    """The loss scale of 16-mixed; it falls exactly when a step was skipped. GradScaler's step reads the host anyway."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.get_scale()


def _clips_through_strategy(trainer: pl.Trainer) -> bool:
    """Whether the strategy leaves the norm that it clipped by."""
    by_norm = trainer.gradient_clip_algorithm in (None, "norm")
    return hasattr(trainer.strategy, "last_grad_norm") and bool(trainer.gradient_clip_val) and by_norm


def _grad_norm(trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> Tensor | None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if hasattr(trainer.strategy, "grad_norm"):  # knows which experts live elsewhere
        return trainer.strategy.grad_norm(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads) if grads else None
