"""Pictures of overlap: one step as lanes, and where the time of a step goes before and after. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_ep.imports import is_available
from lightning_ep.profiling.intervals import Intervals, measure
from lightning_ep.profiling.kernels import Category, KernelTable
from lightning_ep.profiling.report import OverlapReport, lanes, overlap_in, steady_window
from lightning_ep.profiling.text import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind people too.
COLORS = {
    Category.COMMUNICATION: "#D55E00",
    Category.GEMM: "#0072B2",
    Category.ATTENTION: "#56B4E9",
    Category.COMPUTE: "#8C8C8C",
    Category.MEMORY: "#CC79A7",
    Category.UNKNOWN: "#F0E442",
}
_LABELS = {
    Category.GEMM: "GEMM",
    Category.COMPUTE: "other compute",
    Category.MEMORY: "copies",
    Category.UNKNOWN: "unknown",
}
HIDDEN, EXPOSED = "#009E73", "#D55E00"
# (label, colour, milliseconds of a report): they add up to the span.
_PARTS = (
    ("compute alone", "#0072B2", lambda r: r.compute_ms - r.hidden_ms),
    ("compute beside communication", HIDDEN, lambda r: r.hidden_ms),
    ("communication alone (exposed)", EXPOSED, lambda r: r.exposed_ms),
    ("copies alone", "#CC79A7", lambda r: r.gpu_active_ms - r.compute_ms - r.exposed_ms),
    ("idle", "#DDDDDD", lambda r: r.idle_ms),
)
_NS_PER_MS = 1e6
_PIXELS = 3000  # gaps below this fraction of the window would not be seen


def plot_timeline(tables: Sequence[KernelTable], path: str | Path, titles: Sequence[str] | None = None) -> None:
    """One steady step of each trace: streams as lanes, and a last lane with hidden and exposed communication.

    All panels have the same time scale, so that a shorter step looks shorter.

    Args:
        tables: one panel each.
        path: where the picture goes; the suffix says the format.
        titles: instead of the traces' labels.

    Raises:
        ValueError: matplotlib is not installed.
    """
    windows = [steady_window(table) for table in tables]
    widest = max(end - start for start, end in windows)
    rows = [len(lanes(table, window)) + 1 for table, window in zip(tables, windows, strict=True)]
    figure = new_figure(14, sum(0.45 * r + 1.1 for r in rows) + 0.6)
    grid = figure.subplots(len(tables), 1, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    for axes, table, window, title in zip(grid, tables, windows, titles or [t.label for t in tables], strict=True):
        _draw_lanes(axes, table, window, title)
        axes.set_xlim(0, widest / _NS_PER_MS)
    grid[-1].set_xlabel("time in the step (ms)")
    shown = [c for c in COLORS if any(table.of(c).any() for table in tables)]
    handles = [_patch(COLORS[c], _LABELS.get(c, c.name.lower())) for c in shown] + [
        _patch(HIDDEN, "hidden communication")
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path)


def plot_breakdown(groups: Sequence[tuple[str, Sequence[tuple[str, OverlapReport]]]], path: str | Path) -> None:
    """Where the time goes, as stacked bars: each part of the span once, in ms (of a step, where the trace has steps).

    Args:
        groups: (title, [(label, report), ...]); for example one group a rank with "before" and "after".
        path: where the picture goes; the suffix says the format.

    Raises:
        ValueError: matplotlib is not installed.
    """
    bars = [(label, report) for _, group in groups for label, report in group]
    per_step = all(report.step_count for _, report in bars)
    longest = max(len(line) for label, _ in bars for line in label.split("\n"))
    figure = new_figure(max(6.5, max(1.5, 0.1 * longest) * len(bars) + 4.2), 5.2)
    axes = figure.subplots()
    at, ticks = 0.0, []
    for title, group in groups:
        first = at
        for label, report in group:
            _draw_bar(axes, at, report, report.step_count if per_step else 1)
            ticks.append((at, label))
            at += 1
        if title:
            axes.text((first + at - 1) / 2, -0.09, title, transform=axes.get_xaxis_transform(), ha="center", va="top")
        at += 0.5
    axes.set_xticks([x for x, _ in ticks], [label for _, label in ticks])
    axes.set_ylabel("time of a step (ms)" if per_step else "time of the trace (ms)")
    axes.margins(y=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [_patch(color, label) for label, color, _ in reversed(_PARTS)]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.savefig(path)


def _draw_lanes(axes: Axes, table: KernelTable, window: tuple[int, int], title: str) -> None:
    busy = lanes(table, window)
    hidden, exposed = overlap_in(table, window)
    for row, (_, by_category) in enumerate(busy):
        for category, intervals in by_category.items():
            _draw(axes, row, intervals, window, COLORS[category])
    for intervals, color in ((exposed, EXPOSED), (hidden, HIDDEN)):
        _draw(axes, len(busy), intervals, window, color)
    # The overlap as a veil over all lanes: what ran at the same time is seen at a glance.
    for left, width in _visible(hidden, window):
        axes.axvspan(left, left + width, color=HIDDEN, alpha=0.15, linewidth=0, zorder=0)
    total, length = measure(hidden) + measure(exposed), window[1] - window[0]
    share = f", {percent(measure(hidden) / total)} of it beside compute" if total else ""
    axes.set_title(
        f"{title}: {length / _NS_PER_MS:.3g} ms, communication {total / _NS_PER_MS:.3g} ms{share}",
        loc="left",
        fontsize=10,
    )
    axes.set_yticks(range(len(busy) + 1), [f"stream {stream}" for stream, _ in busy] + ["hidden / exposed"])
    axes.set_ylim(len(busy) + 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(axes: Axes, row: int, intervals: Intervals, window: tuple[int, int], color: str) -> None:
    axes.broken_barh(_visible(intervals, window), (row - 0.38, 0.76), facecolors=color, linewidth=0)


def _visible(intervals: Intervals, window: tuple[int, int]) -> list[tuple[float, float]]:
    """(left, width) in ms from the window's start; neighbours that no pixel could separate become one."""
    if not len(intervals):
        return []
    gap = (window[1] - window[0]) / _PIXELS
    first = np.concatenate(([True], intervals[1:, 0] - intervals[:-1, 1] > gap))
    last = np.concatenate((first[1:], [True]))
    left, right = intervals[first, 0] - window[0], intervals[last, 1] - window[0]
    width = np.maximum(right - left, gap / 2)
    return list(zip((left / _NS_PER_MS).tolist(), (width / _NS_PER_MS).tolist(), strict=True))


def _draw_bar(axes: Axes, at: float, report: OverlapReport, steps: int) -> None:
    bottom = 0.0
    for _, color, part in _PARTS:
        height = part(report) / steps
        axes.bar(at, height, 0.8, bottom, color=color)
        if height > 0.05 * report.span_ms / steps:
            light = color == "#DDDDDD"
            axes.text(at, bottom + height / 2, f"{height:.3g}", ha="center", va="center", color="k" if light else "w")
        bottom += height
    hidden = f"\n{percent(report.hidden_fraction)} hidden" if report.hidden_fraction is not None else ""
    axes.text(at, bottom, f"{bottom:.4g} ms{hidden}", ha="center", va="bottom", fontsize=9)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, outside pyplot's global state."""
    if not is_available("matplotlib"):
        raise ValueError("plots need matplotlib, which is not installed; pip install 'lightning-ep[plots]'")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _patch(color: str, label: str):
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)
