"""What computes beside an exchange: kernels alone, and while some multiprocessors (SMs) belong to an exchange.

python3 tests/gpu/bench_beside.py      (P rows, D hidden, I inner, L local experts by environment; no MPS)

A grouped GEMM keeps one block a multiprocessor for its whole life. Where an exchange has taken some, their blocks run after
all others and the GEMM takes twice as long; leaving those multiprocessors out ("spared") costs their share only.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

from lightning_ep.dispatch.emulated_kernel import copy_for

P, D, I, L = (int(os.environ.get(k, d)) for k, d in (("P", 32768), ("D", 2048), ("I", 768), ("L", 8)))
HELD_S, REPEATS = 0.02, 8


def kernels() -> dict[str, Callable[[], object]]:
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    rows, hidden = torch.randn(P, D, **bf16), torch.randn(P, 2 * I, **bf16)
    weight = torch.randn(L, 2 * I, D, **bf16)
    offsets = torch.arange(1, L + 1, dtype=torch.int32, device="cuda") * (P // L)
    x, w = torch.randn(4096, D, **bf16), torch.randn(4096, D, **bf16)
    q, kv = torch.randn(1, 32, 4096, 128, **bf16), torch.randn(1, 32, 4096, 128, **bf16)
    return {
        "experts: product": lambda: F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets),
        "experts: input gradient": lambda: F.grouped_mm(hidden, weight, offs=offsets),
        "experts: weight gradient": lambda: F.grouped_mm(hidden.t(), rows, offs=offsets),
        "projection 2048 -> 4096": lambda: F.linear(x, w),
        "projection 2048 -> 4096, cuBLASLt": lambda: linear_by_lt(x, w),
        "attention": lambda: F.scaled_dot_product_attention(q, kv, kv, is_causal=True),
        "addition of 64 MiB": lambda: rows.add(1),
    }


def linear_by_lt(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    usual = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    y = F.linear(x, w)
    torch.backends.cuda.preferred_blas_library(usual)
    return y


def timed(run: Callable[[], object], held: int, spared: int) -> float:
    """Milliseconds while `held` SMs belong to an exchange and grouped GEMMs leave `spared` out."""
    out, inp = torch.empty(2, 1024, device="cuda").unbind()
    wire = torch.cuda.Stream(priority=-1)
    torch._C._set_sm_carveout_experimental(spared or None)
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        if held:
            with torch.cuda.stream(wire):
                copy_for(out, inp, HELD_S, held)
            time.sleep(1e-3)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        start.record()
        run()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 2)
    torch._C._set_sm_carveout_experimental(None)
    return statistics.median(times)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.cuda.set_device(0)
    cases = [(0, 0), (8, 0), (8, 8), (0, 8), (20, 0), (20, 20), (4, 0), (4, 4)]
    print(f"ms; {torch.cuda.get_device_name()}, torch {torch.__version__}; P {P}, D {D}, I {I}, L {L}")
    print("| kernel |" + "".join(f" {held} SMs held, {spared} spared |" for held, spared in cases))
    print("| --- |" + " --- |" * len(cases))
    for name, run in kernels().items():
        timed(run, 0, 0)
        print(f"| {name} |" + "".join(f" {timed(run, *case):.3f} |" for case in cases), flush=True)
