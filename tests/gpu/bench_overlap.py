"""A Hugging Face Qwen3-MoE under the Trainer over real NCCL: no overlap, 1f1b, 1f1b with delayed wgrad, alternated.

on_one_gpu 2 tests/gpu/bench_overlap.py      (L layers, S tokens, MBS micro-batches, ROUNDS by environment)

Time is from the start of an accumulation window to the last backward's end (forward and backward of all micro-batches),
synchronised; parameters are not changed (lr 0), so that gradients of the modes can be compared bit for bit.
"""

from __future__ import annotations

import os
import time
import warnings

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy
from lightning_ep.bench.shapes import qwen3_30b_a3b
from tests.gpu.common import DEVICE, DEVICES, RANK, WORLD, kernel_times, say, start

L, S, MBS = (int(os.environ.get(k, d)) for k, d in (("L", 6), ("S", 2048), ("MBS", 6)))
ROUNDS = int(os.environ.get("ROUNDS", 3))
MODES = {"none": (False, False), "1f1b": (True, False), "1f1b+wgrad": (True, True)}
WINDOWS = 4  # a mode's turn: two to warm up, two timed


class Module(pl.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            with DEVICE:
                torch.set_default_dtype(torch.bfloat16)
                self.model = qwen3_30b_a3b(L)
                torch.set_default_dtype(torch.float32)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Alternate(pl.Callback):
    """Sets the mode at the start of each window, times it, and keeps gradient samples."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {m: [] for m in MODES}
        self.grads: dict[str, torch.Tensor] = {}
        self.kinds: dict[str, dict[str, float]] = {}
        self.peaks: dict[str, float] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        window, micro = divmod(batch_idx, MBS)
        if micro:
            return
        turn, self.nth = divmod(window, WINDOWS)
        self.mode = list(MODES)[turn % len(MODES)]
        overlap, delay = MODES[self.mode]
        strategy = trainer.strategy
        if not hasattr(self, "schedule"):
            self.schedule = strategy._schedule
        strategy._schedule = self.schedule if overlap else None
        for found in strategy.parallel.experts:
            found.module._expert_parallel.queue = strategy.parallel.queue if delay else None
        if self.nth == 0:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        torch.cuda.synchronize()
        self.profile = None
        if self.nth == 1 and self.mode not in self.kinds:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profile.__enter__()
        self.started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: object) -> None:
        torch.cuda.synchronize()
        took = (time.perf_counter() - self.started) * 1e3
        if self.profile is not None:
            self.profile.__exit__(None, None, None)
            self.kinds[self.mode] = kernel_times(self.profile)
        if self.nth >= 2:
            self.times[self.mode].append(took)
        self.peaks[self.mode] = torch.cuda.max_memory_allocated() / 2**30
        if self.mode not in self.grads:
            self.grads[self.mode] = torch.cat([p.grad.flatten()[:2000].float() for p in module.parameters()])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    start()
    windows = ROUNDS * len(MODES) * WINDOWS
    torch.manual_seed(7 + RANK)
    data = list(torch.randint(0, 1024, (windows * MBS, S)))
    strategy = EPOverlapStrategy(
        expert_model_parallel_size=WORLD, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True
    )  # fmt: skip
    alternate = Alternate()
    torch.use_deterministic_algorithms(bool(int(os.environ.get("DETERMINISTIC", 0))))
    trainer = pl.Trainer(
        **DEVICES, strategy=strategy, precision="bf16-true", max_epochs=1, logger=False,
        accumulate_grad_batches=MBS, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[alternate],
    )  # fmt: skip
    # The same batches for every turn of a mode, so that gradients can be compared.
    batches = [data[i % (WINDOWS * MBS)] for i in range(windows * MBS)]
    trainer.fit(Module(), DataLoader(batches, batch_size=1))
    base = sorted(alternate.times["none"])[len(alternate.times["none"]) // 2]
    for mode, times in alternate.times.items():
        median = sorted(times)[len(times) // 2]
        k = alternate.kinds[mode]
        same = torch.equal(alternate.grads[mode], alternate.grads["none"])
        say(f"world {WORLD} L {L} S {S} MBS {MBS} {mode:11s} {median:7.1f} ms (min {min(times):.1f} max {max(times):.1f}) "
            f"{base / median:.3f}x  comm {k['comm']:.1f} ms, beside compute {k['hidden'] / k['comm']:.1%}, compute "
            f"{k['compute']:.1f}, idle {k['idle']:.1f} of {k['span']:.1f} ms, {k['kernels']} kernels, peak "
            f"{alternate.peaks[mode]:.1f} GiB, gradients equal {same}")  # fmt: skip
    dist.destroy_process_group()
