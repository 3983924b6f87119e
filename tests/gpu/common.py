"""What the GPU scripts share. They run under torchrun; with LIGHTNING_EP_ONE_GPU all ranks share GPU 0."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_ep.bench.shapes import qwen3_30b_a3b
from lightning_ep.config import EPConfig
from lightning_ep.dispatch.alltoall import GroupTransport
from lightning_ep.experts.model import ParallelModel
from lightning_ep.mesh import build_mesh
from lightning_ep.profiling.intervals import intersection, measure, union

ONE_GPU = bool(os.environ.get("LIGHTNING_EP_ONE_GPU"))
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device("cuda", 0 if ONE_GPU else int(os.environ.get("LOCAL_RANK", 0)))
if ONE_GPU:
    os.environ["LOCAL_RANK"] = "0"  # to Lightning each rank is a node of one GPU
DEVICES = (
    {"accelerator": "cuda", "devices": 1, "num_nodes": WORLD} if ONE_GPU else {"accelerator": "cuda", "devices": WORLD}
)


class Qwen3Layers(pl.LightningModule):
    """Some layers of Qwen3-30B-A3B as a language model, trained by plain SGD."""

    def __init__(self, layers: int, lr: float) -> None:
        super().__init__()
        self.layers, self.lr = layers, lr

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = qwen3_30b_a3b(self.layers)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def start() -> None:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)


def say(*words: object) -> None:
    if RANK == 0:
        print(*words, flush=True)


def parallelize(
    model: nn.Module, ep_size: int, transport: type[GroupTransport] = GroupTransport, **options: object
) -> ParallelModel:
    """Spread the model's experts without a Trainer."""
    config = EPConfig(expert_model_parallel_size=ep_size, **options)
    mesh = build_mesh(ep_size, "cuda")
    parallel = ParallelModel(model, config, mesh, transport(mesh.ep_group))
    parallel.shard()
    return parallel


def time_ms(step: Callable[[], object], repeats: int = 6) -> float:
    """Median wall time of one step over all ranks' barrier, in ms."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


def profiled(step: Callable[[], object]) -> torch.profiler.profile:
    """A profile of one step's kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return profile


def kernel_times(profile: torch.profiler.profile) -> dict[str, float]:
    """ms of kernels by kind (union of intervals), communication beside compute, span and idle."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.lower()
            kind = (
                "comm" if "nccl" in name or "deep_ep" in name or "hybrid_ep" in name
                else "gemm" if any(s in name for s in ("gemm", "nvjet", "cutlass", "sm90_xmma"))
                else "attention" if any(s in name for s in ("flash", "sdpa", "fmha", "cudnn_generated"))
                else "moves" if any(s in name for s in ("scatter_rows", "gather_s", "plan_rows", "resolve_rows", "index_rows", "read_slots", "pack"))
                else "other"
            )  # fmt: skip
            kinds.setdefault(kind, []).append((event.time_range.start * 1e3, event.time_range.end * 1e3))
    arrays = {kind: union(np.array(v).astype(np.int64)) for kind, v in kinds.items()}
    comm = arrays.get("comm", np.zeros((0, 2), dtype=np.int64))
    compute = union(np.concatenate([v for k, v in arrays.items() if k != "comm"]))
    every = union(np.concatenate(list(arrays.values())))
    result = {kind: measure(v) / 1e6 for kind, v in arrays.items()}
    result["hidden"] = measure(intersection(comm, compute)) / 1e6
    result["compute"] = measure(compute) / 1e6
    result["span"] = float(every[-1, 1] - every[0, 0]) / 1e6
    result["idle"] = result["span"] - measure(every) / 1e6
    result["kernels"] = sum(len(v) for v in kinds.values())
    return result
