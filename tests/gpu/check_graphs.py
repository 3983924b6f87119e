"""CUDA graphs of the dense parts: bit for bit what the model does without, under every schedule; and what they cost.

python3 tests/gpu/check_graphs.py      (L layers, S tokens, STEPS by environment; one process, emulated fabric, no MPS)

Ends with "all held". Deterministic algorithms, memory filled before its first use: a recording that reads what another
one left behind would show as NaN.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_ep.bench.shapes import qwen3_30b_a3b
from lightning_ep.bench.simulate import EmulatedStrategy
from lightning_ep.dispatch.emulated import EmulatedFabric

L, S, STEPS, MBS = (int(os.environ.get(k, d)) for k, d in (("L", 4), ("S", 1024), ("STEPS", 6), ("MBS", 4)))
GRAPHS = {"cuda_graph_scope": ["attn", "moe_router"]}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
SCHEDULES: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "1f1b": {**OVERLAP, "overlap_schedule": "1f1b"},
    "1f1b + delayed wgrad": {
        **OVERLAP, "overlap_schedule": "1f1b", "delay_wgrad_compute": True, "gradient_accumulation_fusion": True
    },
    "two_batch": {**OVERLAP, "overlap_schedule": "two_batch"},
}  # fmt: skip


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            with torch.device("meta"):
                self.model = qwen3_30b_a3b(L)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss)  # with its graph, as users do: a recording must not meet the stream that it remembers
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Wall time of each step, and of the host's part of it."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % MBS == 0:
            torch.cuda.synchronize()
            self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if (args[-1] + 1) % MBS == 0:
            host = time.perf_counter() - self.start
            torch.cuda.synchronize()
            self.steps.append((1e3 * (time.perf_counter() - self.start), 1e3 * host))


def train(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    module, clock = Module(), Clock()
    fabric = EmulatedFabric(16, 200e9, 20e-6)
    strategy = EmulatedStrategy(fabric, moe_router_force_load_balancing=True, rms_norm_fusion=True, **options)
    trainer = pl.Trainer(
        accelerator="cuda", devices=1, precision="bf16-true", strategy=strategy, accumulate_grad_batches=MBS, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[clock],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 1024, (2, S), generator=generator) for _ in range(STEPS * MBS)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return {
        "losses": torch.stack(module.losses).detach(),
        "params": [p.detach().clone() for p in module.parameters()],
        "steps": clock.steps,
        "peak": torch.cuda.max_memory_allocated() / 2**30,
        "reserved": torch.cuda.max_memory_reserved() / 2**30,
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    held = True
    print(
        "| schedule | losses equal | parameters equal | step, host (ms): plain | graphs | peak, reserved (GiB): plain | graphs |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, schedule in SCHEDULES.items():
        plain, graphs = train(schedule), train({**schedule, **GRAPHS})
        losses = torch.equal(plain["losses"], graphs["losses"])
        params = all(torch.equal(a, b) for a, b in zip(plain["params"], graphs["params"], strict=True))
        held &= losses and params and bool(graphs["losses"].isfinite().all())
        times = [" / ".join(f"{t:.1f}" for t in min(run["steps"][-3:])) for run in (plain, graphs)]
        memory = [f"{run['peak']:.2f} / {run['reserved']:.2f}" for run in (plain, graphs)]
        print(f"| {name} | {losses} | {params} | {times[0]} | {times[1]} | {memory[0]} | {memory[1]} |", flush=True)
        if not losses:
            print(
                "  first step apart:",
                (plain["losses"] != graphs["losses"]).nonzero()[:1].tolist(),
                graphs["losses"][:8].tolist(),
            )
    print("all held" if held else "NOT held")
    raise SystemExit(not held)
