"""Small traces with known answers, written in every format that we read.

The time line, in microseconds:

    stream 7    gemm 0-10 | attention 10-14 | elementwise 20-24 | copy 24-26 |      mystery 38-42
    stream 20         nccl 8-22 (ep/dispatch/3)                     | nccl 30-40 (ep/combine/3)
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path

MAIN, AUTOGRAD = 101, 102


@dataclass(frozen=True)
class Kernel:
    name: str
    stream: int
    start: float
    end: float
    correlation: int
    thread: int = MAIN
    launched: float = 0.0
    category: str = "kernel"


@dataclass(frozen=True)
class Span:
    name: str
    start: float
    end: float
    thread: int = MAIN


GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT"
ATTENTION = "void pytorch_flash::flash_fwd_kernel<...>(Params)"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, ...>"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
MYSTERY = "my_own_zap"

KERNELS = [
    Kernel(GEMM, 7, 0, 10, 1, launched=-9),
    Kernel(ATTENTION, 7, 10, 14, 2, launched=-8),
    Kernel(ELEMENTWISE, 7, 20, 24, 3, launched=-7),
    Kernel("Memcpy DtoH (Device -> Pinned)", 7, 24, 26, 4, launched=-6, category="gpu_memcpy"),
    Kernel(NCCL, 20, 8, 22, 5, launched=-5),
    Kernel(NCCL, 20, 30, 40, 6, thread=AUTOGRAD, launched=-5),
    Kernel(MYSTERY, 7, 38, 42, 7, launched=20),
]
SPANS = [
    Span("ProfilerStep#4", -10, 15),
    Span("ProfilerStep#5", 15, 50),
    Span("ep/dispatch/3", -5.5, -4.5),
    Span("ep/experts/3", -6, -4, AUTOGRAD),
    Span("ep/combine/3", -5.5, -4.5, AUTOGRAD),
    Span("Optimizer.step#AdamW.step", -10, 50),
]

EXPECTED_MS = {
    "span_ms": 0.042,
    "comm_ms": 0.024,
    "hidden_ms": 0.010,
    "hidden_gemm_attention_ms": 0.006,
    "exposed_ms": 0.014,
    "compute_ms": 0.022,
    "gpu_active_ms": 0.038,
    "idle_ms": 0.004,
}

# Beyond what a float of microseconds could hold to the nanosecond.
BASE_US = 1_785_000_000_000_000


def _us(time: float) -> str:
    return f"{BASE_US + int(time // 1)}.{round(time % 1 * 1000):03d}"


def kineto_text(kernels=KERNELS, spans=SPANS, rank: int | None = 2) -> str:
    """As Kineto writes it: a header, indented events, times with three decimals."""
    events = [_event("cpu_op", "aten::mm", MAIN, MAIN, -9.5, 1, {"External id": 1})]
    for k in kernels:
        args = {"correlation": k.correlation}
        events.append(_event("cuda_runtime", "cudaLaunchKernel", MAIN, k.thread, k.launched, 0.1, args))
        args = {"device": 0, "stream": k.stream, "correlation": k.correlation, "grid": [1, 1, 1]}
        events.append(_event(k.category, k.name, 0, k.stream, k.start, k.end - k.start, args))
        events.append(f'{{"ph": "s", "id": {k.correlation}, "cat": "ac2g", "name": "ac2g", "ts": {_us(k.launched)}}}')
    events += [_event("user_annotation", s.name, MAIN, s.thread, s.start, s.end - s.start, {}) for s in spans]
    distributed = (
        f'"distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": 4}},' if rank is not None else ""
    )
    return (
        f'{{\n  "schemaVersion": 1, {distributed}\n  "traceEvents": [\n  '
        + ",\n  ".join(events)
        + '\n  ],\n  "traceName": "x.json"\n}\n'
    )


def _event(category: str, name: str, pid: int, tid: int, start: float, duration: float, args: dict) -> str:
    return (
        f'{{\n    "ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {_us(start)}, "dur": {duration:.3f},\n    "args": {json.dumps(args)}\n  }}'
    )


def write_kineto(path: Path, **kwargs) -> Path:
    text = kineto_text(**kwargs)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def write_nsys(
    path: Path, kernels=KERNELS, spans=SPANS, process: int = 4711, into: sqlite3.Connection | None = None
) -> Path:
    """An export with the tables and columns that Nsight Systems writes; `into`: add a process to an open one."""
    db = into or sqlite3.connect(path)
    pid = process << 24
    db.executescript(
        """
        CREATE TABLE IF NOT EXISTS StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
            contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER,
            shortName INTEGER);
        CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER,
            streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER);
        CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER);
        CREATE TABLE IF NOT EXISTS NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT,
            globalTid INTEGER, textId INTEGER);
        """
    )

    def ns(time: float) -> int:
        return 1_000_000 + round(time * 1000)

    def string(text: str) -> int:
        found = db.execute("SELECT id FROM StringIds WHERE value = ?", (text,)).fetchone()
        return found[0] if found else db.execute("INSERT INTO StringIds (value) VALUES (?)", (text,)).lastrowid

    for k in kernels:
        if k.category == "kernel":
            row = (ns(k.start), ns(k.end), 0, 1, k.stream, k.correlation, pid, string(k.name), string("short"))
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?)", row)
        else:
            row = (ns(k.start), ns(k.end), 0, k.stream, k.correlation, pid, 64)
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?)", row)
        launch = (ns(k.launched), ns(k.launched) + 100, pid + k.thread, k.correlation, string("cudaLaunchKernel"))
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)", launch)
    for i, s in enumerate(spans):
        # Every other one as a registered string.
        text, text_id = (None, string(s.name)) if i % 2 else (s.name, None)
        row = (ns(s.start), ns(s.end), 59, text, pid + s.thread, text_id)
        db.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?)", row)
    db.execute("INSERT INTO NVTX_EVENTS VALUES (0, NULL, 34, 'a mark', 0, NULL)")
    db.commit()
    if into is None:
        db.close()
    return path


def training(overlap: bool, layers: int = 4, steps: int = 3) -> tuple[list[Kernel], list[Span]]:
    """Steps of a small MoE model; with `overlap` each exchange runs beside the next two pieces of compute."""
    kernels, spans = [], []
    compute, comm = 0.0, 0.0

    def add(name: str, stream: int, start: float, length: float, range_name: str | None) -> float:
        k = len(kernels) + 1
        launched = k * 1.0
        kernels.append(Kernel(name, stream, start, start + length, k, launched=launched))
        if range_name:
            spans.append(Span(range_name, launched - 0.4, launched + 0.4))
        return start + length

    for step in range(steps):
        first = len(kernels)
        for layer in range(layers):
            for name, length in ((GEMM, 60), (ATTENTION, 90), (GEMM, 40), (ELEMENTWISE, 20)):
                compute = add(name, 7, compute + 1, length, None)
            for kind in ("dispatch", "combine"):
                comm = add(NCCL, 20, max(compute, comm) + 2, 150, f"ep/{kind}/{layer}")
                if not overlap:
                    compute = comm
                if kind == "dispatch":
                    for _ in range(2):
                        compute = add(GEMM, 7, compute + 1, 55, f"ep/experts/{layer}")
        compute = add("multi_tensor_apply_kernel", 7, max(compute, comm), 30, None)
        compute = add("Memcpy DtoH (Device -> Pinned)", 7, compute + 4, 3, None)
        spans.append(Span(f"ProfilerStep#{step}", first + 0.5, len(kernels) + 0.5))
    return kernels, spans
