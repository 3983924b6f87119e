"""`lightning-ep ab`: matched runs of one config that differ in what is varied, and nothing else."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_ep.bench.child import RunFailed, run_child
from lightning_ep.bench.plan import THIS_PYTHON, Case, Plan, cases_of, parse_a2a_overlap, parse_steady, parse_vary
from lightning_ep.bench.report import COLUMNS, ABReport, CaseResult, sentence
from lightning_ep.callbacks.parity import StepRecord, compare_runs, header_differences, read_run, tolerance_for

_MAX_RECORD = 1 << 26
INTERRUPTED = 130


@dataclass
class Comparison:
    """A plan under way: results so far, written to `folder` after every run."""

    plan: Plan
    folder: Path
    report: ABReport
    results: dict[str, CaseResult]
    profiled: dict[str, Path] = field(default_factory=dict)
    baseline_losses: Path | None = None
    severity: dict[str, int] = field(default_factory=dict)

    def take(self, case: Case, run: Path) -> None:
        """Add a timed run's records to its case.

        Raises:
            RunFailed: the run left no usable records.
        """
        record = _read_record(run / "steps.json")
        first, last = self.plan.first, self.plan.last
        steady = record["step_seconds"][first - 2 : last - 1]  # the first value is of step 2
        if len(steady) < last - first + 1:
            raise RunFailed(f"ended before step {last}: is the data too short?")
        result = self.results[case.name]
        result.step_seconds.append(steady)
        result.gpus = record["world_size"]
        result.tokens_per_step, result.flops_per_step = record["tokens_per_step"], record["flops_per_step"]
        result.peak_memory_bytes = max(result.peak_memory_bytes or 0, record["peak_memory_bytes"])
        self.report.conditions["hardware"] = f"{record['world_size']} x {record['device']}"
        self.report.conditions["precision"] = record["precision"]
        self.report.conditions["versions"] = ", ".join(f"{k} {v}" for k, v in record["versions"].items() if v)
        self._take_losses(result, run / "losses.jsonl")

    def _take_losses(self, result: CaseResult, path: Path) -> None:
        header, records = read_run(path)
        steps = list(records.values())
        result.skipped_steps += sum(step.skipped for step in steps)
        result.non_finite_steps += sum(not step.finite for step in steps)
        result.loss_finite = result.loss_finite is not False and all(step.finite for step in steps)
        if self.baseline_losses is None and result is self.report.cases[0]:
            self.baseline_losses, result.parity = path, "baseline"
        elif self.baseline_losses is not None:
            severity, text = _parity(header, steps, *read_run(self.baseline_losses))
            # What the worst of the repeats says; the baseline's own repeats count too.
            if not result.parity or severity > self.severity.get(result.name, 0):
                self.severity[result.name], result.parity = severity, text

    def take_profile(self, case: Case, run: Path) -> None:
        """Add a profiled run's overlap to its case."""
        report = _read_record(run / "ep_overlap-rank0000.json")
        result = self.results[case.name]
        result.hidden_fraction = report["hidden_fraction"]
        result.hidden_gemm_attention_fraction = report.get("hidden_gemm_attention_fraction")
        self.report.conditions["overlap from"] = report["source"]
        if (trace := run / "ep_overlap-rank0000.pt.trace.json.gz").exists():
            self.profiled[case.name] = trace

    def write(self, plots: dict[str, str] | None = None) -> None:
        self.report.write(self.folder, f"A/B: {', '.join(self.plan.configs)}", plots)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when no case could be measured, 2 for wrong arguments, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        plan, folder = _parse(argv)
    except (ValueError, OSError) as error:
        print(f"lightning-ep ab: {error}", file=sys.stderr)
        return 2
    return compare(plan, folder, f"lightning-ep ab {shlex.join(argv)}")


def compare(plan: Plan, folder: Path, command: str = "", timeout: float | None = None) -> int:
    """Run `plan` and leave the report in `folder`; returns the exit code of `main`."""
    console = Console(stderr=True)
    results = {case.name: CaseResult(case.name) for case in plan.cases}
    conditions: dict[str, Any] = {
        "command": f"`{command}`",
        "steady window": f"steps {plan.first} to {plan.last} of each run, {plan.repeats} repeats, alternated",
        "seed": plan.seed,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    comparison = Comparison(plan, folder, ABReport(list(results.values()), conditions), results)
    code = 0
    try:
        with _progress(console) as progress:
            _run_all(comparison, progress, timeout)
    except KeyboardInterrupt:
        conditions["interrupted"] = "by the user; what follows is what was done until then"
        code = INTERRUPTED
    comparison.write(_plots(comparison, console))
    _print(comparison)
    return code or (0 if any(result.measured for result in results.values()) else 1)


def _run_all(comparison: Comparison, progress: Progress, timeout: float | None) -> None:
    plan = comparison.plan
    profiles = [(-1, case) for case in plan.cases] if plan.profile else []
    runs = plan.order() + profiles
    total = progress.add_task("all runs", total=len(runs), step="")
    for number, (repeat, case) in enumerate(runs):
        profiled = repeat < 0
        result = comparison.results[case.name]
        if not result.failure:
            what = "profiled" if profiled else f"repeat {repeat + 1}/{plan.repeats}"
            name = f"{plan.cases.index(case):02d}-{'profile' if profiled else f'repeat{repeat}'}"
            run = comparison.folder / name
            command = plan.command(case, run, profiled)
            steps = int(next(a for a in command if a.startswith("--trainer.max_steps=")).partition("=")[2])
            task = progress.add_task(f"{case.name} ({what})", total=steps, step="starting")
            try:
                run_child(command, run / "run.log", run / "steps.json.progress", _stepper(progress, task), timeout)
                (comparison.take_profile if profiled else comparison.take)(case, run)
            except (RunFailed, ValueError) as error:
                result.failure = f"{what}: {error}"
                progress.console.print(f"{case.name}: {error}", style="red", markup=False)
            progress.remove_task(task)
            comparison.write()
        progress.update(total, completed=number + 1)


def _stepper(progress: Progress, task: Any) -> Callable[[int], None]:
    return lambda step: progress.update(task, completed=step, step=f"step {step}")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[step]}"), TimeElapsedColumn(), console=console,
    )  # fmt: skip


def _parity(
    header: dict[str, Any], steps: list[StepRecord], theirs: dict[str, Any], baseline: dict[int, StepRecord]
) -> tuple[int, str]:
    """How bad it is, and in words."""
    if differing := header_differences(header, theirs):
        return 2, f"not comparable: {'; '.join(differing)}"
    report = compare_runs(steps, baseline, tolerance_for(header["precision"], theirs["precision"]))
    if not report.ok:
        return 3, f"DIVERGED at step {report.first_divergent_step}: {report.reason}"
    return (1, f"within {report.max_deviation:.2g}") if report.max_deviation else (0, "equal")


def _read_record(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_RECORD:
            raise RunFailed(f"{path} is larger than any record")
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise RunFailed(f"the run left no record: {error}") from error
    if not isinstance(record, dict):
        raise RunFailed(f"{path} is not a record")
    return record


def _plots(comparison: Comparison, console: Console) -> dict[str, str]:
    """Draws what there is; caption -> file name. A plot that fails costs only itself."""
    from lightning_ep.bench import plots

    measured = [case for case in comparison.report.cases if case.measured]
    drawn: dict[str, str] = {}
    try:
        if measured:
            plots.plot_steps(measured, comparison.folder / "steps.png")
            drawn["step time of every steady step, by case"] = "steps.png"
        if comparison.profiled:
            plots.plot_traces(comparison.profiled, comparison.folder)
            drawn["one step of each case: streams as lanes"] = "timeline.png"
            drawn["where the time of a step goes"] = "breakdown.png"
    except ValueError as error:
        console.print(f"plots: {error}", markup=False)
    return drawn


def _print(comparison: Comparison) -> None:
    console = Console()
    table = Table(title="A/B", title_justify="left")
    columns = [i for i, column in enumerate(COLUMNS) if column not in ("tokens/s", "hidden (GEMM+attention)")]
    for i in columns:
        table.add_column(COLUMNS[i], overflow="fold", justify="left" if i == 0 else "right")
    for row in comparison.report.rows():
        table.add_row(*(row[i] for i in columns))
    console.print(table)
    for found in comparison.report.comparisons():
        console.print(sentence(found).replace("**", ""), markup=False)
    console.print(f"{comparison.folder / 'report.md'}, report.json and the runs beside it", markup=False)


def _parse(argv: list[str]) -> tuple[Plan, Path]:
    parser = argparse.ArgumentParser(
        prog="lightning-ep ab",
        description="Runs every combination of what is varied as a fresh training run, the same seed, data and everything "
        "else, alternated; unprofiled for time, once more profiled for the mechanism. The first combination is the "
        "baseline. After -- come overrides for all runs, such as --trainer.devices=2.",
    )
    parser.add_argument("--config", action="append", required=True, help="LightningCLI config; may be repeated")
    parser.add_argument(
        "--vary", action="append", default=[], metavar="KEY=V1,V2",
        help="an argument of the strategy, or a dotted key of the config; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--moe_a2a_overlap", metavar="true|false",
        help="sets overlap_moe_expert_parallel_comm and delay_wgrad_compute together; do not use it to isolate one of "
        "them: vary them by name",
    )  # fmt: skip
    parser.add_argument("--steady", default="5:20", metavar="FIRST:LAST", help="optimizer steps that count, from 1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--no-profile", action="store_true", help="leave the profiled runs out")
    parser.add_argument(
        "--launch", metavar="COMMAND",
        help="what starts a run, such as 'srun lightning-ep' or 'torchrun --nproc-per-node 8 -m lightning_ep'; it gets "
        "fit and its arguments. By default Lightning starts the ranks itself",
    )  # fmt: skip
    parser.add_argument("--out", help="folder for the report; runs/ab-DATE by default")
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    axes = [parse_a2a_overlap(args.moe_a2a_overlap)] if args.moe_a2a_overlap else []
    axes += [parse_vary(text) for text in args.vary]
    if not axes:
        raise ValueError("nothing to compare: give --vary KEY=V1,V2")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: at least 1")
    for path in args.config:
        if not Path(path).is_file():
            raise ValueError(f"--config {path}: no such file")
    first, last = parse_steady(args.steady)
    plan = Plan(
        configs=tuple(args.config), cases=cases_of(axes), first=first, last=last, repeats=args.repeats, seed=args.seed,
        profile=not args.no_profile, extra=tuple(argv[split + 1 :]),
        program=tuple(shlex.split(args.launch)) if args.launch else THIS_PYTHON,
    )  # fmt: skip
    folder = Path(args.out or f"runs/ab-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out {folder} is not empty; give a new folder")
    return plan, folder
