"""OverlapMetrics: how much communication ran beside compute, and what that was worth, in any Lightning logger."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_ep.callbacks.host_exchanges import SOURCE as HOST_SOURCE
from lightning_ep.callbacks.host_exchanges import HostExchanges
from lightning_ep.callbacks.step_clock import StepClock, flops_of, peak_memory, tokens_of

KERNEL_SOURCE = "GPU: unions of kernel intervals of a profiler trace"
_WINDOW_KEYS = ("comm_ms", "hidden_ms", "exposed_ms", "hidden_gemm_attention_ms", "gpu_active_ms")


class OverlapMetrics(pl.Callback):
    """Profiles a few steady steps and logs what overlap did there; times all other steps.

    A step is an optimizer step with all its micro-batches. On the chosen ranks the PyTorch profiler runs for `warmup` +
    `active` steps after `wait` steps; before and after there is no profiler. Nothing here changes a result.

    Logs, once, after the window (a step's mean, averaged over the profiled ranks):

    - `ep_overlap/hidden_fraction`: share of the communication that ran beside any compute; NaN without communication
    - `ep_overlap/comm_ms`, `ep_overlap/hidden_ms`, `ep_overlap/exposed_ms`: communication, its part beside compute, the rest
    - `ep_overlap/hidden_gemm_attention_ms`, `ep_overlap/gpu_active_ms`: on GPUs only

    and with every `log_every_n_steps` of the Trainer, from the steps outside the window:

    - `ep_overlap/step_ms`: mean time of a step
    - `ep_overlap/tokens_per_second`: of all ranks, taking the others to have as many tokens as this one
    - `ep_overlap/tflops_per_gpu`: model TFLOP/s (`lightning_ep.bench.flops`), where the formula covers the model
    - `ep_overlap/peak_memory_gib`: most memory allocated on this rank's GPU; on CPU the process's largest size

    On a CPU, or over gloo, it measures from the launch of each exchange to its wait on the host, and says so. Keys are the
    same on every rank. The values of ranks are reduced with one asynchronous all-reduce, without a barrier.

    Writes `ep_overlap-rank0000.json` (the whole report) and `ep_overlap-rank0000.pt.trace.json.gz` (for `lightning-ep
    analyze`, chrome://tracing, Perfetto) for each profiled rank, named by global rank.

    Args:
        wait: steps before the profiler starts; compilation and the allocator should have settled by then.
        warmup: steps with the profiler on that are thrown away.
        active: steps that are measured.
        ranks: global ranks to profile, or "all".
        dirpath: where the files go; the Trainer's log directory by default.
        save_trace: keep the trace beside the JSON.
        flops_per_token: training FLOPs of one token, for models that the formula does not cover.
    """

    def __init__(
        self,
        wait: int = 10,
        warmup: int = 1,
        active: int = 3,
        ranks: Sequence[int] | Literal["all"] = (0,),
        dirpath: str | None = None,
        save_trace: bool = True,
        flops_per_token: float | None = None,
    ) -> None:
        for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
            if value < least:
                raise ValueError(f"{name}={value} is not a number of steps; set it to {least} or more")
        self.wait, self.warmup, self.active = wait, warmup, active
        self.ranks, self.dirpath, self.save_trace = ranks, dirpath, save_trace
        self.flops_per_token = flops_per_token
        self.report: dict[str, Any] | None = None  # of this rank, once its window is over
        self._profiler: torch.profiler.profile | None = None
        self._exchanges: HostExchanges | None = None
        self._pending: tuple[Tensor, Any] | None = None

    # -- Lightning's hooks

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        folder = self.dirpath or trainer.log_dir or trainer.default_root_dir  # log_dir asks rank 0: on every rank
        self._files = str(Path(folder) / f"ep_overlap-rank{trainer.global_rank:04d}")
        self._where = {"global_rank": trainer.global_rank, "world_size": trainer.world_size}
        self._device = module.device
        self._profiled = self.ranks == "all" or trainer.global_rank in self.ranks
        self._on_host = _sees_no_kernels(module.device)
        self._clock = StepClock(module.device)
        self._step_seconds: list[float] = []
        self._tokens = self._length = self._steps = 0
        self._step_tokens: int | None = None
        self._flops = self.flops_per_token
        self._global_step = trainer.global_step
        self.report, self._pending, self._window_over = None, None, False
        if self.wait == 0:
            self._start_window()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (found := tokens_of(batch)) is not None:
            self._tokens += found[0]
            self._length = max(self._length, found[1])
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._steps += 1
        self._step_tokens, self._tokens = self._tokens or None, 0
        self._on_step_end(trainer, module)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._stop_profiling()
        self._step_seconds += self._clock.take(wait=True)
        if self._pending is not None:
            self._log(trainer, self._window_metrics())
        elif not self._window_over:
            last = self.wait + self.warmup + self.active
            rank_zero_warn(f"OverlapMetrics: training ended after {self._steps} steps, its window after step {last}.")
        if self.report is not None and self._step_seconds:
            seconds = sum(self._step_seconds) / len(self._step_seconds)
            self.report["outside_window"] = self._step_metrics(module, seconds) | {"steps": len(self._step_seconds)}
            self._write()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_profiling()

    # -- the window

    def _on_step_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        first, last = self.wait + self.warmup, self.wait + self.warmup + self.active
        if self._pending is not None:
            metrics = self._window_metrics()
            self._log(trainer, metrics, module)
        if not self.wait <= self._steps <= last:
            self._clock.tick()
        elif self._steps == self.wait:
            self._clock.tick()  # the last step before the window
            self._clock.pause()
            self._start_window()
        elif self._steps < last:
            if self._profiler is not None:
                self._profiler.step()
            if self._steps == first and self._exchanges is not None:
                self._exchanges.start()
        else:
            self._end_window()
        if self._steps % trainer.log_every_n_steps == 0:
            self._log_steps(trainer, module)

    def _start_window(self) -> None:
        if not self._profiled:
            return
        if self._on_host:
            self._exchanges = HostExchanges()
            if self.warmup == 0:
                self._exchanges.start()
            return
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        schedule = torch.profiler.schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1)
        self._profiler = torch.profiler.profile(
            activities=activities, schedule=schedule, on_trace_ready=self._on_trace, **_all_threads()
        )
        self._profiler.start()

    def _end_window(self) -> None:
        self._window_over = True
        if self._profiler is not None:
            self._profiler.step()  # the last one: hands over the trace
        if self._exchanges is not None:
            self._exchanges.stop()
            self._keep(self._exchanges.report(), HOST_SOURCE)
        self._stop_profiling()
        values = [0.0] * (len(_WINDOW_KEYS) + 1)
        if self.report is not None:
            values = [*((self.report.get(key) or 0.0) / self.active for key in _WINDOW_KEYS), 1.0]
        total, work = torch.tensor(values, dtype=torch.float64, device=self._device), None
        if _world() > 1:
            work = dist.all_reduce(total, async_op=True)
        self._pending = total, work  # read a step later

    def _on_trace(self, profiler: torch.profiler.profile) -> None:
        from lightning_ep.profiling.readers import read_trace
        from lightning_ep.profiling.report import overlap_report

        trace = self._path("pt.trace.json")
        profiler.export_chrome_trace(str(trace))
        try:
            tables = read_trace(trace)
            mine = next((t for t in tables if t.device == self._device.index), tables[0])
            self._keep(overlap_report(mine).to_dict(), KERNEL_SOURCE)
        except ValueError as error:
            print(f"OverlapMetrics: no report from this rank: {error}", file=sys.stderr)
        if self.save_trace:
            # Fast compression: the other ranks wait for this one.
            with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb", compresslevel=1) as packed:
                shutil.copyfileobj(plain, packed, 1 << 20)
        trace.unlink()

    def _keep(self, report: dict[str, Any], source: str) -> None:
        first = self.wait + self.warmup + 1
        self.report = report | {"source": source, "steps": list(range(first, first + self.active))} | self._where
        self._write()

    def _write(self) -> None:
        path = self._path("json")
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)

    def _path(self, suffix: str) -> Path:
        path = Path(f"{self._files}.{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _stop_profiling(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.on_trace_ready = None  # a window that was cut short is no measurement
            profiler.stop()
        if self._exchanges is not None:
            self._exchanges.stop()
            self._exchanges = None

    # -- what is logged

    def _window_metrics(self) -> dict[str, float]:
        assert self._pending is not None
        (total, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        *sums, ranks = total.tolist()
        if not ranks:
            return {}
        means = dict(zip(_WINDOW_KEYS, (s / ranks for s in sums), strict=True))
        if self._on_host:
            del means["hidden_gemm_attention_ms"], means["gpu_active_ms"]
        means["hidden_fraction"] = means["hidden_ms"] / means["comm_ms"] if means["comm_ms"] else math.nan
        source = HOST_SOURCE if self._on_host else KERNEL_SOURCE
        rank_zero_info(
            f"Overlap ({source}): {means['hidden_ms']:.3f} of {means['comm_ms']:.3f} ms communication a step beside compute, "
            f"{means['exposed_ms']:.3f} ms exposed."
        )
        return means

    def _log_steps(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        seconds = self._clock.take()
        if seconds:
            self._step_seconds += seconds
            self._log(trainer, self._step_metrics(module, sum(seconds) / len(seconds)), module)

    def _step_metrics(self, module: pl.LightningModule, seconds: float) -> dict[str, float]:
        metrics = {"step_ms": seconds * 1e3, "peak_memory_gib": peak_memory(module.device) / 2**30}
        if self._step_tokens is not None:
            metrics["tokens_per_second"] = self._step_tokens * _world() / seconds
            if self._flops is None:
                self._flops = flops_of(module, self._length) or 0.0
            if self._flops:
                metrics["tflops_per_gpu"] = self._flops * self._step_tokens / seconds / 1e12
        return metrics

    @staticmethod
    def _log(trainer: pl.Trainer, metrics: dict[str, float], module: pl.LightningModule | None = None) -> None:
        """To the loggers at once (`log` would drop what falls between two logging steps), and to callback_metrics."""
        named = {f"ep_overlap/{name}": value for name, value in metrics.items()}
        if not named:
            return
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        if module is not None:
            module.log_dict(named, on_step=True, on_epoch=False, logger=False, sync_dist=False, batch_size=1)


def _sees_no_kernels(device: torch.device) -> bool:
    """Whether exchanges run outside the GPU, where no profiler of kernels finds them."""
    return device.type != "cuda" or (_world() > 1 and dist.get_backend() == "gloo")


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _all_threads() -> dict[str, Any]:
    """Profile the thread of parked backwards too, where this torch can."""
    try:
        return {"experimental_config": torch._C._profiler._ExperimentalConfig(profile_all_threads=True)}
    except (AttributeError, TypeError):
        return {}
