"""One layer's experts on one GPU: grouped_mm against Transformer Engine, and the ways to accumulate a weight gradient.

python3 tests/gpu/bench_experts.py      (P rows, D hidden, I inner, L local experts "8,64" by environment)

Times are medians of CUDA events; host: how long Python needs to launch; memory: what a step takes beyond its result.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_ep.dispatch.base import ExpertRows
from lightning_ep.experts import gemm, wgrad_kernels
from lightning_ep.experts.gemm import Gemm, Split, TorchGemm
from lightning_ep.experts.grouped import grouped_experts
from lightning_ep.experts.layer import _LAYOUT, Experts
from lightning_ep.experts.wgrad import WeightGradQueue
from lightning_ep.imports import is_available

P, D, I = (int(os.environ.get(k, d)) for k, d in (("P", 32768), ("D", 2048), ("I", 768)))
EXPERTS = [int(n) for n in os.environ.get("L", "8,64").split(",")]
TE = is_available("transformer_engine")
DEVICE, BF16 = torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True)
class Row:
    what: str
    gpu_ms: float
    host_ms: float
    extra_mib: float
    tflops: float

    def __str__(self) -> str:
        return f"| {self.what} | {self.gpu_ms:.3f} | {self.tflops:.0f} | {self.host_ms:.3f} | {self.extra_mib:.0f} |"


def measure(what: str, step: Callable[[], object], flops: float, repeats: int = 30) -> Row:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    gpu, host = [], []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # about 1 ms, so that the host is ahead: a launch-bound step shows as host time
        start.record()
        began = time.perf_counter()
        step()
        host.append((time.perf_counter() - began) * 1e3)
        end.record()
        torch.cuda.synchronize()
        gpu.append(start.elapsed_time(end))
    ms = statistics.median(gpu)
    return Row(what, ms, statistics.median(host), extra / 2**20, flops / ms / 1e9)


def make_split(num_experts: int) -> Split:
    """Rows as a random router deals them: about even."""
    torch.manual_seed(0)
    counts = torch.randint(num_experts, (P,)).bincount(minlength=num_experts)
    return Split(counts.cumsum(0, dtype=torch.int32).to(DEVICE), counts.tolist())


def backends() -> dict[str, Gemm]:
    found: dict[str, Gemm] = {"grouped_mm": TorchGemm()}
    if TE:
        from lightning_ep.experts.transformer_engine import TransformerEngineGemm

        found["TE"] = TransformerEngineGemm()
    return found


def products(num_experts: int) -> list[Row]:
    """The gate and up projection `[P, D] -> [P, 2I]`: each product alone."""
    split, flops = make_split(num_experts), 2 * P * D * 2 * I
    weight = torch.randn(num_experts, 2 * I, D, device=DEVICE).to(BF16)
    x, grad = (torch.randn(P, n, device=DEVICE).to(BF16) for n in (D, 2 * I))
    rows = []
    for name, backend in backends().items():
        steps = {
            "product": partial(backend.product, x, weight, split, False),
            "input gradient": partial(backend.input_grad, grad, weight, split, False),
            "weight gradient": partial(backend.weight_grad, grad, x, split, False),
        }
        rows += [measure(f"L {num_experts}, {name}: {what}", step, flops) for what, step in steps.items()]
    return rows


def accumulation(num_experts: int) -> list[Row]:
    """The gate and up projection's weight gradient on top of what is there."""
    split, flops = make_split(num_experts), 2 * P * D * 2 * I
    x, grad = (torch.randn(P, n, device=DEVICE).to(BF16) for n in (D, 2 * I))
    half = torch.zeros(num_experts, 2 * I, D, device=DEVICE, dtype=BF16)
    full = torch.zeros(num_experts, 2 * I, D, device=DEVICE)
    own = TorchGemm()
    steps: dict[str, Callable[[], object]] = {
        "bf16 gradient, product then addition (off, bf16-true)": lambda: half.add_(
            own.weight_grad(grad, x, split, False)
        ),
        "float32 gradient, product, cast, addition (off, bf16-mixed)": lambda: full.add_(
            own.weight_grad(grad, x, split, False).float()
        ),
        "float32 gradient, product then addition": lambda: full.add_(own.weight_grad(grad, x, split, False)),
        f"float32 gradient, a GEMM an expert (addmm: {gemm._adds_to_float32(BF16, DEVICE)})": lambda: gemm.add_outer(
            full, grad, x, split
        ),
        "float32 gradient, Triton": lambda: wgrad_kernels.add_outer(full, grad, x, split.offsets_L),
    }
    if TE:
        te = backends()["TE"]
        steps["bf16 gradient, TE product then addition"] = lambda: half.add_(te.weight_grad(grad, x, split, False))
        steps["bf16 gradient, TE accumulates"] = lambda: te.add_weight_grad(half, grad, x, split, False)
        steps["float32 gradient, TE accumulates"] = lambda: te.add_weight_grad(full, grad, x, split, False)
    rows = [measure(f"L {num_experts}, {what}", step, flops) for what, step in steps.items()]
    return rows + _tiles(num_experts, full, grad, x, split, flops)


def _tiles(num_experts: int, full: Tensor, grad: Tensor, x: Tensor, split: Split, flops: float) -> list[Row]:
    """The Triton kernel's other shapes."""
    rows, kept = [], (wgrad_kernels._TILE, wgrad_kernels._ROWS, wgrad_kernels._WARPS)
    for tile, step_rows, warps in (((128, 128), 64, 4), ((128, 128), 64, 8), ((256, 128), 64, 8), ((128, 256), 32, 8)):
        wgrad_kernels._TILE, wgrad_kernels._ROWS, wgrad_kernels._WARPS = tile, step_rows, warps
        what = f"L {num_experts}, float32 gradient, Triton, tile {tile[0]} x {tile[1]} x {step_rows}, {warps} warps"
        try:
            rows.append(measure(what, lambda: wgrad_kernels.add_outer(full, grad, x, split.offsets_L), flops))
        except Exception as error:
            print(f"{what}: {type(error).__name__} {error}", flush=True)
    wgrad_kernels._TILE, wgrad_kernels._ROWS, wgrad_kernels._WARPS = kept
    return rows


def layer(num_experts: int) -> list[Row]:
    """Forward and backward of the experts, weighted SwiGLU included, as a training step runs them."""
    split, flops = make_split(num_experts), 3 * 2 * P * D * 3 * I
    torch.manual_seed(0)
    with DEVICE:
        experts = Experts(D, I, num_experts, 0.02).to(BF16)
    x = torch.randn(P, D, device=DEVICE).to(BF16).requires_grad_()
    weights = torch.rand(P, device=DEVICE).requires_grad_()
    grad = torch.randn(P, D, device=DEVICE).to(BF16)
    rows = []
    for name, backend in backends().items():
        for mode in ("", ", delayed", ", fused", ", fused and delayed"):
            queue = WeightGradQueue(fuse="fused" in mode)
            queue.delay = "delayed" in mode
            for p in experts.parameters():
                p.grad = None

            def step(backend: Gemm = backend, queue: WeightGradQueue = queue) -> None:
                inputs = ExpertRows(x, weights, split.offsets_L, split.counts)
                grouped_experts(experts, _LAYOUT, inputs, backend, 0, queue).backward(grad)
                queue.flush()

            rows.append(measure(f"L {num_experts}, {name}{mode}", step, flops))
    return rows + (te_modules(num_experts, split, flops) if TE else [])


def te_modules(num_experts: int, split: Split, flops: float) -> list[Row]:
    """TE's own `GroupedLinear` twice, without anything between: its GEMMs and what its module costs."""
    import transformer_engine.pytorch as te

    rows = []
    for delay in (False, True):
        up = te.GroupedLinear(num_experts, D, 2 * I, bias=False, params_dtype=BF16, delay_wgrad_compute=delay)
        down = te.GroupedLinear(num_experts, I, D, bias=False, params_dtype=BF16, delay_wgrad_compute=delay)
        x = torch.randn(P, D, device=DEVICE).to(BF16).requires_grad_()
        grad = torch.randn(P, D, device=DEVICE).to(BF16)

        def step(up=up, down=down, x=x, grad=grad, delay: bool = delay) -> None:
            down(up(x, split.counts)[:, :I].contiguous(), split.counts).backward(grad)
            if delay:
                down.backward_dw()
                up.backward_dw()

        rows.append(measure(f"L {num_experts}, TE GroupedLinear modules{', delayed' * delay}", step, flops))
    return rows


if __name__ == "__main__":
    torch.cuda.set_device(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, TE {TE}; P {P}, D {D}, I {I}", flush=True)
    tables: dict[str, list[Row]] = {}
    for title, bench in (("one product", products), ("accumulating a weight gradient", accumulation), ("layer", layer)):
        for num_experts in EXPERTS:
            tables.setdefault(title, []).extend(rows := bench(num_experts))
            print(*rows, sep="\n", flush=True)
            torch.cuda.empty_cache()
    for title, rows in tables.items():
        print(f"\n| {title} | GPU ms | TFLOP/s | host ms | extra MiB |\n|---|---|---|---|---|")
        print(*rows, sep="\n", flush=True)
