"""Pictures of an A/B comparison. Need matplotlib."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_ep.bench.report import CaseResult
from lightning_ep.profiling.plots import new_figure, plot_breakdown, plot_timeline
from lightning_ep.profiling.readers import read_trace
from lightning_ep.profiling.report import overlap_report
from lightning_ep.profiling.text import rounded_down

_MARKERS = "osD^v<>ph"


def plot_steps(cases: Sequence[CaseResult], path: str | Path) -> None:
    """Every steady step as a point, each case's mean as a line and the range of its repeats as a band.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = new_figure(max(6.0, 2.4 * len(cases) + 1.5), 4.6)
    axes = figure.subplots()
    for x, case in enumerate(cases):
        low, high = case.range
        axes.fill_between([x - 0.38, x + 0.38], low, high, color="#0072B2", alpha=0.2, linewidth=0)
        axes.hlines(case.mean, x - 0.38, x + 0.38, color="#0072B2", linewidth=2)
        for repeat, steps in enumerate(case.step_seconds):
            places = [x - 0.3 + 0.6 * (i + 0.5) / len(steps) for i in range(len(steps))]
            axes.plot(places, steps, _MARKERS[repeat % len(_MARKERS)], color="#444444", markersize=3.5, alpha=0.7)
        ratio = rounded_down(cases[0].mean / case.mean, 3)
        axes.text(
            x, 1.01, f"{case.mean:.4g} s\n{ratio}x", transform=axes.get_xaxis_transform(), ha="center", va="bottom"
        )
    axes.set_xticks(range(len(cases)), [_wrapped(case.name) for case in cases], fontsize=9)
    axes.set_xlim(-0.6, len(cases) - 0.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("time of a step (s)")
    axes.set_xlabel(
        "points: steady steps (one marker a repeat); line: mean; band: range of the repeats' means", fontsize=8
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def plot_traces(traces: Mapping[str, Path], folder: Path) -> None:
    """`timeline.png` and `breakdown.png` of each case's profiled run.

    Args:
        traces: case name -> trace file.
        folder: where the pictures go.

    Raises:
        ValueError: matplotlib is not installed, or a trace cannot be read.
    """
    tables = {name: read_trace(path)[0] for name, path in traces.items()}
    plot_timeline(list(tables.values()), folder / "timeline.png", list(tables))
    groups = [("", [(_wrapped(name), overlap_report(table)) for name, table in tables.items()])]
    plot_breakdown(groups, folder / "breakdown.png")


def _wrapped(name: str, width: int = 24) -> str:
    """Case names are long: one setting a line, broken at underscores."""
    lines = []
    for setting in name.split(", "):
        line = ""
        for part in re.findall(r"[^_]+_*", setting):
            if line and len(line) + len(part) > width:
                lines.append(line)
                line = ""
            line += part
        lines.append(line)
    return "\n".join(lines)
