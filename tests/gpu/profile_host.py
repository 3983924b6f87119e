"""Host time of one layer's forward and backward, where Python spends it, and GPU time; one process, emulated fabric.

python3 tests/gpu/profile_host.py      (L layers, S tokens by environment)
"""

from __future__ import annotations

import cProfile
import os
import pstats
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_ep.bench.shapes import qwen3_30b_a3b
from lightning_ep.config import EPConfig
from lightning_ep.dense import fuse_rms_norms
from lightning_ep.dispatch.emulated import EmulatedFabric
from lightning_ep.experts.model import ParallelModel
from lightning_ep.mesh import ExpertMesh

L, S, RANKS = (int(os.environ.get(k, d)) for k, d in (("L", 6), ("S", 4096), ("RANKS", 16)))


def build() -> tuple[ParallelModel, torch.nn.Module]:
    alone = dist.group.WORLD
    mesh = DeviceMesh.from_group(
        [alone, alone], "cuda", mesh=torch.zeros(1, 1, dtype=torch.int), mesh_dim_names=("edp", "ep")
    )
    with torch.device("meta"):
        model = qwen3_30b_a3b(L)
    config = EPConfig(expert_model_parallel_size=RANKS, moe_router_force_load_balancing=True)
    parallel = ParallelModel(
        model, config, ExpertMesh(mesh, alone, alone, RANKS, 0, 1, 0, 1), EmulatedFabric(RANKS, 1e15, 0)
    )
    parallel.shard()
    parallel.materialize(torch.device("cuda"))
    if os.environ.get("FUSED_NORMS"):
        fuse_rms_norms(model)
    return parallel, model.train()


def timed(name: str, fn, repeats: int = 5):
    host, gpu = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = fn()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        gpu.append(time.perf_counter() - start)
    print(
        f"{name:34s} host {sorted(host)[repeats // 2] * 1e3 / L:6.2f} ms  until the GPU is done {sorted(gpu)[repeats // 2] * 1e3 / L:6.2f} ms a layer"
    )
    return result


def study(label: str, model: torch.nn.Module, ids: torch.Tensor) -> None:
    def forward():
        return model(input_ids=ids, labels=ids).loss

    for _ in range(4):
        forward().backward()
    timed(f"{label}: forward", forward)
    losses = [forward() for _ in range(3)]
    timed(f"{label}: backward", lambda: losses.pop().backward(), 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward().backward()
        torch.cuda.synchronize()
    cuda = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    print(
        f"{label}: {len(cuda) / L:.0f} kernels a layer, {sum(e.time_range.elapsed_us() for e in cuda) / 1e3 / L:.2f} ms of kernels a layer"
    )
    by_name: dict[str, list[float]] = {}
    for event in cuda:
        by_name.setdefault(event.name[:90], []).append(event.time_range.elapsed_us())
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:22]:
        print(f"  {sum(times) / 1e3 / L:6.3f} ms a layer, {len(times) / L:5.1f} times  {name}")


def launch_cost() -> None:
    """Host microseconds of the smallest operations."""
    x = torch.zeros(8, device="cuda")
    for name, fn in (
        ("x.add_(1)", lambda: x.add_(1)),
        ("x.view(-1)", lambda: x.view(-1)),
        ("torch.empty", lambda: torch.empty(8, device="cuda")),
    ):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(900):
            fn()
        print(f"{name:12s} {(time.perf_counter() - start) / 900 * 1e6:.1f} us")


if __name__ == "__main__":
    torch.cuda.set_device(0)
    launch_cost()
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29777", rank=0, world_size=1)
    torch.set_default_dtype(torch.bfloat16)
    _, model = build()
    ids = torch.randint(0, 1024, (1, S), device="cuda")
    study("eager", model, ids)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(4):
        model(input_ids=ids, labels=ids)
    profiler.disable()
    torch.cuda.synchronize()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(28)
    dist.destroy_process_group()
