"""The evidence callbacks on a GPU: what they cost outside their window, what they find in it, traces for HTA.

on_one_gpu 2 tests/gpu/check_evidence.py      (L layers, S tokens, MBS micro-batches by environment; files into $OUT)

Prints the step time without callbacks and with them (alternated; at most 0.5% more is the promise), the logged window,
and what the report of each rank does not know. `tests/gpu/compare_hta.py $OUT/*.json.gz` then compares with
HolisticTraceAnalysis, on any machine.
"""

from __future__ import annotations

import json
import os
import statistics
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy
from lightning_ep.callbacks import ExpertLoad, LossParity, OverlapMetrics
from lightning_ep.callbacks.step_clock import StepClock
from tests.gpu.common import DEVICE, DEVICES, RANK, WORLD, Qwen3Layers, say, start

L, S, MBS = (int(os.environ.get(k, d)) for k, d in (("L", 6), ("S", 2048), ("MBS", 6)))
OUT = Path(os.environ.get("OUT", "runs/evidence"))
STEPS, SETTLED = 14, 4


class Clock(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.clock, self.step = StepClock(DEVICE), 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.clock.tick()

    def on_train_end(self, *args: object) -> None:
        self.seconds = self.clock.take(wait=True)[SETTLED:]


def fit(*callbacks: pl.Callback, overlap: bool = True) -> tuple[list[float], dict[str, float]]:
    """Step times in s and the logged metrics."""
    torch.manual_seed(0)
    clock = Clock()
    trainer = pl.Trainer(
        **DEVICES, strategy=EPOverlapStrategy(WORLD, overlap_moe_expert_parallel_comm=overlap), precision="bf16-true",
        max_steps=STEPS, logger=False, accumulate_grad_batches=MBS, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, use_distributed_sampler=False, log_every_n_steps=2,
        callbacks=[clock, *callbacks],
    )  # fmt: skip
    tokens = torch.randint(0, 1024, (STEPS * MBS, S), generator=torch.Generator().manual_seed(RANK))
    trainer.fit(Qwen3Layers(L, lr=1e-3), DataLoader(list(tokens), batch_size=1))
    return clock.seconds, {k: v.item() for k, v in trainer.callback_metrics.items()}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    start()
    plain, watched = [], []
    for _ in range(2):
        plain += fit()[0]
        metrics = OverlapMetrics(wait=10**6, dirpath=str(OUT))
        watched += fit(metrics, LossParity(str(OUT / "cost.jsonl")), ExpertLoad(dirpath=str(OUT)))[0]
    without, beside = statistics.median(plain), statistics.median(watched)
    say(f"step {1e3 * without:.2f} ms, with callbacks {1e3 * beside:.2f} ms: {beside / without - 1:+.2%}")
    for overlap in (False, True):
        name = "on" if overlap else "off"
        found = OverlapMetrics(wait=6, warmup=1, active=3, ranks="all", dirpath=str(OUT / name))
        parity = LossParity(str(OUT / name / "losses.jsonl"), str(OUT / "off" / "losses.jsonl") if overlap else None)
        _, logged = fit(found, parity, overlap=overlap)
        say(f"overlap {name}: {json.dumps(logged)}")
        say(f"parity: {parity.report}")
        assert found.report is not None
        print(f"rank {RANK} unknown: {found.report['unknown_names']}", flush=True)
        print(f"rank {RANK} counts: {found.report['category_count']}", flush=True)
        for row in found.report["ranges"]:
            print(f"rank {RANK} {row}", flush=True)
