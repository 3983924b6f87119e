"""From what a reader found to kernel tables: which range launched a kernel, which step it belongs to.

A kernel runs long after it was launched and on another time line, so a range on the host says nothing about the time
of its kernels. What links them is the correlation id that the profiler writes on both the launch (a runtime call on a
host thread) and the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_ep.profiling.kernels import KernelTable
from lightning_ep.profiling.rules import DEFAULT_RULES, Rule, categorize

RANGE_NAME = re.compile(r"^ep/")
STEP_NAME = re.compile(r"^(ProfilerStep#|step[ _/#]?)\d+$")
# torch.autograd.profiler.emit_nvtx appends ", op_id = 7" and the like.
_KNOWN_SPAN = re.compile(r"^(ep/[^,\s]+|(?:ProfilerStep#|step[ _/#]?)\d+)(?:, .*)?$")

Ints = NDArray[np.int64]


def _no_ints() -> Ints:
    return np.empty(0, np.int64)


@dataclass
class Launches:
    """Runtime calls that may have launched something, `C` rows: process, correlation id, host thread, time in ns."""

    process_C: Ints = field(default_factory=_no_ints)
    correlation_C: Ints = field(default_factory=_no_ints)
    thread_C: Ints = field(default_factory=_no_ints)
    time_C: Ints = field(default_factory=_no_ints)


@dataclass
class Spans:
    """Named stretches of time, `S` rows. `lane`: the host thread, or for spans on the GPU its stream."""

    names: Sequence[str] = ()
    name_S: Ints = field(default_factory=_no_ints)  # index into names
    lane_S: Ints = field(default_factory=_no_ints)
    start_S: Ints = field(default_factory=_no_ints)
    end_S: Ints = field(default_factory=_no_ints)

    def matching(self, pattern: re.Pattern[str]) -> Spans:
        keep = np.array([bool(pattern.search(name)) for name in self.names], bool)
        rows = keep[self.name_S] if len(self.name_S) else slice(0)
        return Spans(self.names, self.name_S[rows], self.lane_S[rows], self.start_S[rows], self.end_S[rows])


@dataclass
class RawTrace:
    """What a reader found, before attribution: `N` GPU activities in any order, times in ns."""

    source: str
    rank: int | None
    names: Sequence[str]
    name_N: Ints
    process_N: Ints
    device_N: Ints
    stream_N: Ints
    correlation_N: Ints  # -1: none
    start_N: Ints
    end_N: Ints
    launches: Launches = field(default_factory=Launches)
    host_spans: Spans = field(default_factory=Spans)
    gpu_spans: Spans = field(default_factory=Spans)


def known_span(name: object) -> str | None:
    """The name of a range or step that reports use, cleaned of what profilers append; None for any other span."""
    found = _KNOWN_SPAN.match(name) if isinstance(name, str) else None
    return found[1] if found else None


def kernel_tables(raw: RawTrace, rules: Iterable[Rule] = DEFAULT_RULES) -> list[KernelTable]:
    """One table for each (process, GPU) in the trace: overlap between two GPUs, or two ranks, would mean nothing."""
    launch_N = _launch_of(raw)
    range_N, ranges = _range_of(raw, launch_N)
    rules = tuple(rules)
    tables = []
    for process, device in sorted({(int(p), int(d)) for p, d in zip(raw.process_N, raw.device_N, strict=True)}):
        rows = np.flatnonzero((raw.process_N == process) & (raw.device_N == device))
        rows = rows[np.argsort(raw.start_N[rows], kind="stable")]
        name_N = raw.name_N[rows].astype(np.int32)
        tables.append(
            KernelTable(
                source=raw.source,
                rank=raw.rank,
                process=process,
                device=device,
                names=tuple(raw.names),
                name_N=name_N,
                stream_N=raw.stream_N[rows],
                start_N=raw.start_N[rows],
                end_N=raw.end_N[rows],
                category_N=categorize(raw.names, name_N, raw.stream_N[rows], rules),
                ranges=ranges,
                range_N=range_N[rows],
                steps=_steps(raw, rows, launch_N[rows]),
            )
        )
    return tables


def innermost(spans: Spans, lane_Q: Ints, time_Q: Ints) -> Ints:
    """For each query (lane, time) the row of the latest started span of that lane which is still open, or -1."""
    found_Q = np.full(len(time_Q), -1, np.int64)
    for lane in np.unique(spans.lane_S):
        rows = np.flatnonzero(spans.lane_S == lane)
        times, tops = _open_spans(rows, spans.start_S[rows], spans.end_S[rows])
        mine = np.flatnonzero(lane_Q == lane)
        at = np.searchsorted(times, time_Q[mine], side="right") - 1
        found_Q[mine] = np.where(at >= 0, tops[at], -1)
    return found_Q


def _open_spans(rows: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Breakpoints of one lane: from each time on, until the next, the innermost open span (or -1)."""
    # At equal times closing comes first; of two that open together the longer is the outer one.
    opening = [(int(s), 1, -int(e), int(row)) for s, e, row in zip(start, end, rows, strict=True) if e > s]
    closing = [(int(e), 0, 0, int(row)) for s, e, row in zip(start, end, rows, strict=True) if e > s]
    stack: list[int] = []
    times, tops = [], []
    for time, opens, _, row in sorted(opening + closing):
        stack.append(row) if opens else stack.remove(row)
        times.append(time)
        tops.append(stack[-1] if stack else -1)
    return np.array(times, np.int64), np.array(tops, np.int64)


def _launch_of(raw: RawTrace) -> Ints:
    """Row in `raw.launches` of each GPU activity, or -1."""
    launches = raw.launches
    if not len(launches.time_C):
        return np.full(len(raw.name_N), -1, np.int64)
    # Correlation ids are unique within a process only.
    _, key = np.unique(np.concatenate((launches.process_C, raw.process_N)), return_inverse=True)
    key = key * np.int64(1 << 40) + np.concatenate((launches.correlation_C, raw.correlation_N))
    key_C, key_N = key[: len(launches.time_C)], key[len(launches.time_C) :]
    order = np.argsort(key_C, kind="stable")
    at = np.minimum(np.searchsorted(key_C, key_N, sorter=order), len(order) - 1)
    found = order[at]
    return np.where((key_C[found] == key_N) & (raw.correlation_N >= 0), found, -1)


def _range_of(raw: RawTrace, launch_N: Ints) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Range of each GPU activity (index into the returned names, or -1): by its launch, else by GPU-side ranges."""
    names: dict[str, int] = {}
    range_N = np.full(len(raw.name_N), -1, np.int32)
    launched = np.flatnonzero(launch_N >= 0)
    queries = (
        (raw.host_spans, launched, raw.launches.thread_C[launch_N[launched]], raw.launches.time_C[launch_N[launched]]),
        (raw.gpu_spans, np.arange(len(raw.name_N)), raw.stream_N, raw.start_N),
    )
    for spans, rows, lane, time in queries:
        spans = spans.matching(RANGE_NAME)
        found = innermost(spans, lane, time)
        take = (found >= 0) & (range_N[rows] < 0)
        used = spans.name_S[found[take]]
        index = {int(n): names.setdefault(spans.names[n], len(names)) for n in np.unique(used)}
        range_N[rows[take]] = [index[int(n)] for n in used]
    return range_N, tuple(names)


def _steps(raw: RawTrace, rows: Ints, launch_R: Ints) -> Ints:
    """`[S, 2]`: each step on the GPU, from its first launched kernel's start to that of the next step."""
    steps = raw.host_spans.matching(STEP_NAME)
    if not len(steps.name_S) or not len(rows):
        return np.empty((0, 2), np.int64)
    first = []
    for start, end in sorted(zip(steps.start_S.tolist(), steps.end_S.tolist(), strict=True)):
        launched_at = raw.launches.time_C[launch_R] if len(raw.launches.time_C) else raw.start_N[rows]
        inside = (launched_at >= start) & (launched_at < end) & ((launch_R >= 0) | (not len(raw.launches.time_C)))
        if inside.any():
            first.append((int(raw.start_N[rows][inside].min()), int(raw.end_N[rows][inside].max())))
    ends = [start for start, _ in first[1:]] + [first[-1][1]] if first else []
    return np.array([[s, e] for (s, _), e in zip(first, ends, strict=True) if e > s], np.int64).reshape(-1, 2)
