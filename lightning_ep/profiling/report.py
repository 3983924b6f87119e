"""The overlap report: how much of the communication ran beside compute, and what that left exposed.

Every figure is a measure of interval unions on the time line of one GPU; durations are never added up, since two
kernels that run together would count twice and slow each other down. Definitions: docs/evidence.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ep.profiling.intervals import Intervals, clip, difference, intersection, measure, union
from lightning_ep.profiling.kernels import COMPUTE, GEMM_AND_ATTENTION, Category, KernelTable

_NS_PER_MS = 1e6
_SHOWN_NAMES = 8


@dataclass(frozen=True)
class RangeRow:
    """One kind of range (`ep/dispatch`), or one layer: the kernels that were launched inside."""

    name: str
    kernel_count: int
    gpu_ms: float  # union of its kernels
    comm_ms: float
    hidden_ms: float  # of its communication, beside any compute of the whole trace
    exposed_ms: float


@dataclass(frozen=True)
class OverlapReport:
    """Overlap on one GPU; times in milliseconds over the whole span of the trace."""

    trace: str
    rank: int | None
    device: int
    step_count: int
    span_ms: float  # first start to last end
    comm_ms: float
    hidden_ms: float  # communication beside any compute
    hidden_fraction: float | None  # None: no communication at all
    hidden_gemm_attention_ms: float
    hidden_gemm_attention_fraction: float | None
    exposed_ms: float
    compute_ms: float
    gpu_active_ms: float
    idle_ms: float
    kernel_count: int  # copies and memsets not counted
    copy_count: int
    category_ms: dict[str, float]
    category_count: dict[str, int]
    unknown_names: dict[str, int]  # most frequent first
    ranges: list[RangeRow] = field(default_factory=list)
    layers: list[RangeRow] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return asdict(self)


def overlap_report(table: KernelTable) -> OverlapReport:
    """The report of one GPU's trace."""
    everything = table.intervals()
    active, comm, compute = (
        union(everything),
        union(table.intervals(table.of(Category.COMMUNICATION))),
        compute_of(table),
    )
    span = int(active[-1, 1] - active[0, 0]) if len(active) else 0
    hidden = measure(intersection(comm, compute))
    dense = measure(intersection(comm, table.intervals(table.of(*GEMM_AND_ATTENTION))))
    total = measure(comm)
    unknown = table.of(Category.UNKNOWN)
    return OverlapReport(
        trace=table.label,
        rank=table.rank,
        device=table.device,
        step_count=len(table.steps),
        span_ms=span / _NS_PER_MS,
        comm_ms=total / _NS_PER_MS,
        hidden_ms=hidden / _NS_PER_MS,
        hidden_fraction=hidden / total if total else None,
        hidden_gemm_attention_ms=dense / _NS_PER_MS,
        hidden_gemm_attention_fraction=dense / total if total else None,
        exposed_ms=(total - hidden) / _NS_PER_MS,
        compute_ms=measure(compute) / _NS_PER_MS,
        gpu_active_ms=measure(active) / _NS_PER_MS,
        idle_ms=(span - measure(active)) / _NS_PER_MS,
        kernel_count=int((~table.of(Category.MEMORY)).sum()),
        copy_count=int(table.of(Category.MEMORY).sum()),
        category_ms={c.name.lower(): measure(table.intervals(table.of(c))) / _NS_PER_MS for c in Category},
        category_count={c.name.lower(): int(table.of(c).sum()) for c in Category},
        unknown_names=_counts(table, unknown),
        ranges=_rows(table, compute, lambda name: name.rpartition("/")[0] if _layer(name) is not None else name),
        layers=_rows(table, compute, lambda name: None if _layer(name) is None else f"layer {_layer(name)}"),
    )


def compute_of(table: KernelTable) -> Intervals:
    """Where the GPU computed: everything that is neither communication nor a copy, unknown kernels included."""
    return union(table.intervals(table.of(*COMPUTE)))


def steady_window(table: KernelTable) -> tuple[int, int]:
    """(start, end) in ns of the step in the middle; of the whole trace when it has no steps."""
    if len(table.steps):
        start, end = table.steps[len(table.steps) // 2]
        return int(start), int(end)
    return int(table.start_N.min()), int(table.end_N.max())


def lanes(table: KernelTable, window: tuple[int, int]) -> list[tuple[int, dict[Category, Intervals]]]:
    """What each stream did inside `window`: (stream, intervals by category), streams with communication last."""
    found = []
    for stream in np.unique(table.stream_N):
        on_stream = table.stream_N == stream
        busy = {c: clip(table.intervals(on_stream & table.of(c)), *window) for c in Category}
        if any(len(rows) for rows in busy.values()):
            found.append((int(stream), {c: rows for c, rows in busy.items() if len(rows)}))
    return sorted(found, key=lambda lane: (Category.COMMUNICATION in lane[1], lane[0]))


def overlap_in(table: KernelTable, window: tuple[int, int]) -> tuple[Intervals, Intervals]:
    """(hidden, exposed) communication inside `window`."""
    comm = clip(table.intervals(table.of(Category.COMMUNICATION)), *window)
    compute = compute_of(table)
    return intersection(comm, compute), difference(comm, compute)


def kernel_differences(a: KernelTable, b: KernelTable) -> dict[str, tuple[int, int]]:
    """Names whose number of launches differs: (in a, in b), the largest difference first. Empty: the same kernels."""
    in_a, in_b = a.counts_by_name(), b.counts_by_name()
    differing = {n: (in_a.get(n, 0), in_b.get(n, 0)) for n in in_a | in_b if in_a.get(n, 0) != in_b.get(n, 0)}
    return dict(sorted(differing.items(), key=lambda item: -abs(item[1][0] - item[1][1])))


def pair_with_baseline(
    tables: Sequence[KernelTable], baselines: Sequence[KernelTable]
) -> list[tuple[KernelTable, KernelTable]]:
    """Each trace with its baseline: by rank where all have one, else in the given order.

    Raises:
        ValueError: a trace without a partner.
    """
    if len(tables) != len(baselines):
        raise ValueError(f"{len(tables)} traces but {len(baselines)} baselines; give one baseline for each trace")
    by_rank = {table.rank: table for table in baselines}
    if None in by_rank or len(by_rank) < len(baselines) or {table.rank for table in tables} != set(by_rank):
        return list(zip(tables, baselines, strict=True))
    return [(table, by_rank[table.rank]) for table in tables]


def _layer(name: str) -> int | None:
    tail = name.rpartition("/")[2]
    return int(tail) if tail.isdecimal() else None


def _rows(table: KernelTable, compute: Intervals, group) -> list[RangeRow]:
    """One row for each value of `group(range name)`; ranges for which it is None are left out."""
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(table.ranges):
        if (key := group(name)) is not None:
            groups.setdefault(key, []).append(index)
    rows = []
    for key, members in groups.items():
        inside = np.isin(table.range_N, members)
        if inside.any():
            comm = union(table.intervals(inside & table.of(Category.COMMUNICATION)))
            hidden = measure(intersection(comm, compute))
            rows.append(
                RangeRow(
                    name=key,
                    kernel_count=int((inside & ~table.of(Category.MEMORY)).sum()),
                    gpu_ms=measure(table.intervals(inside)) / _NS_PER_MS,
                    comm_ms=measure(comm) / _NS_PER_MS,
                    hidden_ms=hidden / _NS_PER_MS,
                    exposed_ms=(measure(comm) - hidden) / _NS_PER_MS,
                )
            )
    return sorted(rows, key=lambda row: (_layer(row.name.replace("layer ", "/")) or 0, row.name))


def _counts(table: KernelTable, mask: NDArray[np.bool_]) -> dict[str, int]:
    counts = np.bincount(table.name_N[mask], minlength=len(table.names))
    top = np.argsort(-counts, kind="stable")[:_SHOWN_NAMES]
    return {table.names[i]: int(counts[i]) for i in top if counts[i]}
