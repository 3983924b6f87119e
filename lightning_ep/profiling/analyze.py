"""`lightning-ep analyze`: how much of the communication in a profiler trace ran beside compute."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_ep.profiling.kernels import KernelTable
from lightning_ep.profiling.readers import read_trace
from lightning_ep.profiling.report import OverlapReport, kernel_differences, overlap_report, pair_with_baseline
from lightning_ep.profiling.rules import DEFAULT_RULES, load_rules
from lightning_ep.profiling.text import milliseconds, percent

_ROWS = (
    ("communication", lambda r: milliseconds(r.comm_ms)),
    ("  beside any compute", lambda r: f"{milliseconds(r.hidden_ms)}  {percent(r.hidden_fraction)}"),
    (
        "  beside GEMM and attention",
        lambda r: f"{milliseconds(r.hidden_gemm_attention_ms)}  {percent(r.hidden_gemm_attention_fraction)}",
    ),
    ("  exposed", lambda r: milliseconds(r.exposed_ms)),
    ("compute", lambda r: milliseconds(r.compute_ms)),
    ("GPU active", lambda r: milliseconds(r.gpu_active_ms)),
    ("idle", lambda r: milliseconds(r.idle_ms)),
    ("span", lambda r: milliseconds(r.span_ms)),
    ("steps", lambda r: str(r.step_count or "-")),
    ("kernels", lambda r: f"{r.kernel_count:,}"),
    ("unknown kernels", lambda r: f"{r.category_count['unknown']:,}  {milliseconds(r.category_ms['unknown'])}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when a trace cannot be read, with the reason on standard error."""
    args = _parser().parse_args(argv)
    try:
        rules = load_rules(args.rules) if args.rules else DEFAULT_RULES
        tables = [table for path in args.traces for table in read_trace(path, rules)]
        baselines = [table for path in args.baseline for table in read_trace(path, rules)]
        pairs = pair_with_baseline(tables, baselines) if baselines else [(table, None) for table in tables]
        results = [(overlap_report(a), overlap_report(b) if b is not None else None) for a, b in pairs]
        for table, baseline in pairs:
            if baseline is not None:
                _warn_about_differences(table, baseline)
        if args.json:
            print(json.dumps([_as_dict(*result) for result in results], indent=2))
        else:
            _print(results)
        if args.plot:
            _plot(pairs, results, Path(args.plot))
    except ValueError as error:
        print(f"lightning-ep analyze: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ep analyze",
        description="Overlap of communication and compute, from unions of kernel intervals. Reads PyTorch profiler "
        "traces (.json, .json.gz) and Nsight Systems SQLite exports; several files are several ranks.",
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--baseline", nargs="+", default=[], metavar="TRACE", help="the same ranks without overlap")
    parser.add_argument("--json", action="store_true", help="print a list with one object a trace instead of tables")
    parser.add_argument(
        "--plot", metavar="OUT.png", help="one steady step as lanes, and with --baseline bars beside it"
    )
    parser.add_argument(
        "--rules", metavar="RULES.json", help="own kernel categories: a list of {category, name, stream}"
    )
    return parser


def _as_dict(report: OverlapReport, baseline: OverlapReport | None) -> dict:
    return report.to_dict() | ({"baseline": baseline.to_dict()} if baseline is not None else {})


def _warn_about_differences(table: KernelTable, baseline: KernelTable) -> None:
    differing = kernel_differences(baseline, table)
    if differing:
        examples = "; ".join(
            f"{name[:70]} {before:,} -> {after:,}" for name, (before, after) in list(differing.items())[:3]
        )
        print(
            f"warning: {table.label} does not have the kernels of its baseline {baseline.label} "
            f"({len(differing)} names differ: {examples}). The two may not have done the same work.",
            file=sys.stderr,
        )


def _print(results: Sequence[tuple[OverlapReport, OverlapReport | None]]) -> None:
    console = Console(soft_wrap=False)
    summary = Table(title="Overlap of communication and compute", title_justify="left")
    summary.add_column("")
    columns = []
    for report, baseline in results:
        if baseline is not None:
            columns.append((f"{baseline.trace}\n(baseline)", baseline))
        columns.append((report.trace, report))
    for title, _ in columns:
        summary.add_column(title, justify="right", overflow="fold")
    for name, value in _ROWS:
        summary.add_row(name, *(value(report) for _, report in columns))
    console.print(summary)
    for title, report in columns:
        if report.unknown_names:
            names = ", ".join(f"{name[:60]} ({count:,})" for name, count in report.unknown_names.items())
            console.print(f"{title}: unknown kernels, counted as compute: {names}", markup=False)
        for heading, rows in (("range", report.ranges), ("layer", report.layers)):
            if rows:
                console.print(_breakdown(f"{title}, by {heading}", heading, rows))


def _breakdown(title: str, heading: str, rows) -> Table:
    table = Table(title=title.replace("\n", " "), title_justify="left")
    table.add_column(heading)
    for column in ("kernels", "GPU", "comm", "hidden", "", "exposed"):
        table.add_column(column, justify="right")
    for row in rows:
        share = percent(row.hidden_ms / row.comm_ms) if row.comm_ms else "-"
        times = (milliseconds(value) for value in (row.gpu_ms, row.comm_ms, row.hidden_ms))
        table.add_row(row.name, f"{row.kernel_count:,}", *times, share, milliseconds(row.exposed_ms))
    return table


def _plot(pairs, results, path: Path) -> None:
    from lightning_ep.profiling.plots import plot_breakdown, plot_timeline

    panels = [(t, s) for table, base in pairs for t, s in ((base, "baseline, "), (table, "")) if t is not None]
    plot_timeline([table for table, _ in panels], path, [f"{prefix}{table.label}" for table, prefix in panels])
    written = [str(path)]
    if any(baseline is not None for _, baseline in results):
        bars = path.with_name(f"{path.stem}-bars{path.suffix}")
        groups = [
            ("" if len(results) == 1 else _short(report), [("before", baseline), ("after", report)])
            for report, baseline in results
        ]
        plot_breakdown(groups, bars)
        written.append(str(bars))
    print(f"plots: {', '.join(written)}", file=sys.stderr)


def _short(report: OverlapReport) -> str:
    return f"rank {report.rank}" if report.rank is not None else report.trace
