"""Dispatcher conformance with real kernels: each dispatcher against one process, extreme routings, poisoned memory.

on_one_gpu 2 tests/gpu/check_dispatchers.py [alltoall | deepep | hybridep ...]      (all by default)

Every line stands for itself: a dispatcher whose library is missing says so, and the others go on.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from typing import NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own condition for determinism

import torch
import torch.distributed as dist

from lightning_ep.config import EPConfig
from lightning_ep.dispatch import Carrier, make_carrier
from lightning_ep.libraries import LibraryError
from lightning_ep.mesh import ExpertMesh, build_mesh
from tests.dispatch.conformance import OPTIONS, ROUTINGS, TOLERANCE, errors_of, poisoned_memory, wrong
from tests.gpu.common import DEVICE, RANK, WORLD, say, start

HIDDEN, INNER = 512, 64


class Line(NamedTuple):
    dispatcher: str
    dtype: torch.dtype
    fused: bool
    poisoned: bool


BF16, FP32 = torch.bfloat16, torch.float32
LINES = (
    Line("alltoall", BF16, True, False),
    Line("alltoall", BF16, True, True),
    Line("alltoall", BF16, False, True),
    Line("alltoall", FP32, True, False),
    Line("alltoall without dedup", BF16, True, True),
    Line("deepep", BF16, True, False),
    Line("deepep", BF16, True, True),
    Line("deepep", BF16, False, True),
    Line("hybridep", BF16, True, False),
    Line("hybridep", BF16, True, True),
)


def check(line: Line, mesh: ExpertMesh, carrier: Carrier) -> tuple[str, dict[str, float]]:
    """The worst quantity of any rank, in words, and what is above the tolerance."""
    bad: dict[str, float] = {}
    worst = (0.0, "")
    with poisoned_memory() if line.poisoned else nullcontext():
        for name, routing in ROUTINGS.items():
            options = OPTIONS[line.dispatcher] | {"moe_permute_fusion": line.fused}
            errors = errors_of(routing, mesh, HIDDEN, INNER, line.dtype, DEVICE, carrier, **options)
            bad |= {f"{name}: {what}": error for what, error in wrong(errors, line.dtype).items()}
            worst = max(worst, *((error, f"{name}: {what}") for what, error in errors.items()))
    torch.cuda.synchronize()
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, (worst, bad))
    (error, what), _ = max(everyone)
    return f"worst {error:.1e} ({what})", {k: v for _, one in everyone for k, v in one.items()}


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["alltoall", "deepep", "hybridep"]
    start()
    torch.backends.cuda.matmul.allow_tf32 = False
    mesh = build_mesh(WORLD, "cuda", timedelta(seconds=60))
    carriers: dict[str, Carrier] = {}  # one for all lines: HybridEP compiles kernels for each
    rows, failed = [], False
    for line in LINES:
        if not line.dispatcher.startswith(tuple(wanted)):
            continue
        began, verdict, bad = time.perf_counter(), "", {}
        try:
            if line.dispatcher not in carriers:
                carriers[line.dispatcher] = make_carrier(EPConfig(WORLD, **OPTIONS[line.dispatcher]), mesh)
            words, bad = check(line, mesh, carriers[line.dispatcher])
            verdict = f"{'FAILED' if bad else 'ok':7s} {words}"
        except LibraryError as error:
            verdict = f"not run: {error}"
        except Exception:
            print(f"rank {RANK}, {line}:\n{traceback.format_exc()}", flush=True)
            verdict, failed = "FAILED  (traceback above)", True
        failed |= bool(bad)
        took = time.perf_counter() - began
        rows.append(
            f"{line.dispatcher:23s} {str(line.dtype)[6:]:9s} {'fused' if line.fused else 'plain':6s} "
            f"{'poisoned' if line.poisoned else '':9s} {took:5.1f} s  {verdict}"
        )
        say(rows[-1], *(f"\n    {name}: {error:.1e}" for name, error in sorted(bad.items())))
    say(f"\nconformance, {WORLD} ranks, {len(ROUTINGS)} routings x 2 steps, tolerance {TOLERANCE[BF16]:.0e} (bfloat16)")
    say("\n".join(rows))
    if not failed:
        for carrier in carriers.values():
            carrier.close()
    dist.destroy_process_group()
    sys.exit(failed)
