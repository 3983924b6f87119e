"""A Hugging Face Qwen3-MoE under the Trainer over real NCCL: no overlap, 1f1b, 1f1b with delayed wgrad, alternated.

on_one_gpu 2 tests/gpu/bench_overlap.py      (L layers, S tokens, MBS micro-batches, ROUNDS, DISPATCHER, FUSED_NORMS, GRAPHS
by environment)

Parameters do not change (lr 0) and every step sees the same batches, so that gradients of the modes can be compared.
"""

from __future__ import annotations

import os
import warnings

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy
from lightning_ep.bench.alternate import MODES, Alternate
from tests.dispatch.conformance import OPTIONS
from tests.gpu.common import DEVICES, RANK, WORLD, Qwen3Layers, say, start

L, S, MBS = (int(os.environ.get(k, d)) for k, d in (("L", 6), ("S", 2048), ("MBS", 6)))
ROUNDS, FUSED_NORMS = int(os.environ.get("ROUNDS", 3)), bool(int(os.environ.get("FUSED_NORMS", 0)))
GRAPHS = ["attn", "moe_router"] if int(os.environ.get("GRAPHS", 0)) else None
DISPATCHER = os.environ.get("DISPATCHER", "alltoall")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    start()
    torch.use_deterministic_algorithms(bool(int(os.environ.get("DETERMINISTIC", 0))))
    alternate = Alternate(MBS, ROUNDS)
    trainer = pl.Trainer(
        **DEVICES, strategy=EPOverlapStrategy(WORLD, rms_norm_fusion=FUSED_NORMS, cuda_graph_scope=GRAPHS, **OPTIONS[DISPATCHER]), precision="bf16-true", max_epochs=1,
        logger=False, accumulate_grad_batches=MBS, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=[alternate],
    )  # fmt: skip
    torch.manual_seed(7 + RANK)
    step = torch.randint(0, 1024, (MBS, S))
    trainer.fit(Qwen3Layers(L, lr=0.0), DataLoader([step[i % MBS] for i in range(alternate.num_batches)], batch_size=1))
    base = alternate.measured[MODES[0].name]
    for name, measured in alternate.measured.items():
        r = measured.report
        same = torch.equal(measured.gradients, base.gradients)
        say(
            f"{DISPATCHER} world {WORLD} L {L} S {S} MBS {MBS} fused norms {FUSED_NORMS} graphs {GRAPHS} {name:22s} {measured.median_ms:7.1f} ms (min {min(measured.step_ms):.1f} "
            f"max {max(measured.step_ms):.1f}, host {min(measured.host_ms):.1f}) {base.median_ms / measured.median_ms:.3f}x  "
            f"comm {r.comm_ms:.1f} ms, beside compute {r.hidden_fraction:.1%}, compute {r.compute_ms:.1f}, idle "
            f"{r.idle_ms:.1f} of {r.span_ms:.1f} ms, {r.kernel_count} kernels, peak {measured.peak_bytes / 2**30:.1f} GiB, "
            f"gradients equal {same}"
        )
    dist.destroy_process_group()
