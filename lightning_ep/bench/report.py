"""The A/B report: what matched runs took, and whether the difference means anything.

From the raw times of the steady steps of each case and repeat. A case's **spread** is the range of its repeats' means
(of its steps, where there is one repeat). Two cases differ only if these ranges do not touch; a difference inside the
spread is never called a gain. Written figures are rounded down.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from lightning_ep.profiling.text import percent, rounded_down

Verdict = Literal["gain", "loss", "inside the spread"]


@dataclass
class CaseResult:
    """What the runs of one case recorded.

    `step_seconds`: for each repeat the times of its steady steps. `flops_per_step`: model FLOPs of a whole step of all
    GPUs, None where unknown. `hidden_fraction` and `hidden_gemm_attention_fraction`: from the profiled run. `parity`:
    one sentence on the comparison with the first case's losses. `failure`: why the case has no (more) numbers.
    """

    name: str
    step_seconds: list[list[float]] = field(default_factory=list)
    gpus: int = 1
    tokens_per_step: int | None = None
    flops_per_step: float | None = None
    peak_memory_bytes: int | None = None
    loss_finite: bool | None = None
    skipped_steps: int = 0
    non_finite_steps: int = 0
    parity: str = ""
    hidden_fraction: float | None = None
    hidden_gemm_attention_fraction: float | None = None
    failure: str = ""

    @property
    def measured(self) -> bool:
        return any(self.step_seconds)

    @property
    def mean(self) -> float:
        """Seconds of a steady step, over all steps of all repeats."""
        steps = [seconds for repeat in self.step_seconds for seconds in repeat]
        return sum(steps) / len(steps)

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest mean of a repeat; of a step, where there is one repeat."""
        repeats = [repeat for repeat in self.step_seconds if repeat]
        samples = [sum(repeat) / len(repeat) for repeat in repeats] if len(repeats) > 1 else repeats[0]
        return min(samples), max(samples)

    @property
    def spread(self) -> float:
        """Half the width of `range`: what to write after "±"."""
        low, high = self.range
        return (high - low) / 2

    @property
    def tflops_per_gpu(self) -> float | None:
        return None if self.flops_per_step is None else self.flops_per_step / self.mean / self.gpus / 1e12

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens_per_step is None else self.tokens_per_step / self.mean


@dataclass(frozen=True)
class Comparison:
    """One case against another."""

    case: str
    against: str
    relative_speed: float  # 1.317: this many times as fast
    time_reduction: float  # 0.15059: this share of the step time is gone
    throughput_gain: float  # 0.17729: this much more work a second
    verdict: Verdict


def compare(case: CaseResult, against: CaseResult) -> Comparison:
    """`case` against `against`; both must have measured something."""
    (low, high), (other_low, other_high) = case.range, against.range
    verdict: Verdict = "gain" if high < other_low else "loss" if low > other_high else "inside the spread"
    ratio = against.mean / case.mean
    return Comparison(case.name, against.name, ratio, 1 - 1 / ratio, ratio - 1, verdict)


@dataclass
class ABReport:
    """All cases of a comparison, the first one being the baseline, and the conditions under which they ran."""

    cases: list[CaseResult]
    conditions: dict[str, Any] = field(default_factory=dict)

    def comparisons(self) -> list[Comparison]:
        """Each measured case against the baseline, and from the third on against the case before it."""
        measured = [case for case in self.cases if case.measured]
        if not measured or measured[0] is not self.cases[0]:
            return []
        found = [compare(case, measured[0]) for case in measured[1:]]
        return found + [compare(case, before) for before, case in pairwise(measured[1:])]

    def to_dict(self) -> dict[str, Any]:
        """Raw times and everything derived from them, unrounded."""
        derived = ("mean", "spread", "tflops_per_gpu", "tokens_per_second")
        return {
            "conditions": self.conditions,
            "cases": [
                asdict(case) | ({name: getattr(case, name) for name in derived} if case.measured else {})
                for case in self.cases
            ],
            "comparisons": [asdict(comparison) for comparison in self.comparisons()],
        }

    def to_markdown(self, title: str = "A/B report", plots: Mapping[str, str] | None = None) -> str:
        """The report for people; `plots`: caption -> path, relative to where the Markdown will lie."""
        lines = [f"# {title}", ""]
        lines += [f"- {name}: {value}" for name, value in self.conditions.items()] + [""]
        lines += [*_markdown_table(COLUMNS, self.rows()), ""]
        lines += [sentence(comparison) for comparison in self.comparisons()]
        lines += [f"- {case.name}: no result. {case.failure}" for case in self.cases if case.failure]
        for caption, path in (plots or {}).items():
            lines += ["", f"![{caption}]({path})"]
        return "\n".join([*lines, "", _FOOTNOTE, ""])

    def rows(self) -> list[list[str]]:
        """Cells in the order of `COLUMNS`, one row a case."""
        baseline = self.cases[0] if self.cases and self.cases[0].measured else None
        return [_row(case, baseline) for case in self.cases]

    def write(self, folder: str | Path, title: str = "A/B report", plots: Mapping[str, str] | None = None) -> None:
        """`report.md` and `report.json` in `folder`; a reader never sees a half-written file."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "report.md", self.to_markdown(title, plots))
        _replace(folder / "report.json", json.dumps(self.to_dict(), indent=2) + "\n")


COLUMNS = (
    "case", "steady step", "spread", "relative", "TFLOP/s per GPU", "tokens/s", "peak memory", "loss finite", "skipped",
    "NaN", "parity", "hidden", "hidden (GEMM+attention)",
)  # fmt: skip

_FOOTNOTE = (
    "Steady step: mean over all steady steps of all repeats, unprofiled. Spread: half the range of the repeats' means "
    "(of the steps, with one repeat). A difference counts only where the ranges do not touch. Hidden: share of the "
    "communication's time beside compute, from unions of kernel intervals of a separate, profiled run. Figures are "
    "rounded down. Definitions and the FLOP formula: docs/evidence.md."
)


def sentence(comparison: Comparison) -> str:
    """One line for people: what the comparison allows to say, and no more."""
    c = comparison
    ratio = f"{rounded_down(c.relative_speed, 3)}x"
    if c.verdict == "inside the spread":
        return f"- {c.case} against {c.against}: {ratio}, **inside the spread: no difference shown**."
    change = (
        f"{_signed_percent(c.time_reduction)} of the step time saved, {_signed_percent(c.throughput_gain)} throughput"
    )
    word = "a gain" if c.verdict == "gain" else "slower"
    return f"- {c.case} against {c.against}: {ratio}, **{word}**: {change}."


def _signed_percent(fraction: float) -> str:
    return percent(fraction, 3) if fraction < 0 else f"+{percent(fraction, 3)}"


def _row(case: CaseResult, baseline: CaseResult | None) -> list[str]:
    if not case.measured:
        return [case.name, "failed" if case.failure else "not run", *[""] * (len(COLUMNS) - 2)]
    relative = rounded_down(compare(case, baseline).relative_speed, 3) + "x" if baseline is not None else "-"
    tflops, tokens = case.tflops_per_gpu, case.tokens_per_second
    return [
        case.name,
        f"{case.mean:.4f} s",
        f"± {case.spread:.4f} s",
        relative,
        "-" if tflops is None else rounded_down(tflops, 3 if tflops < 1000 else 1),
        "-" if tokens is None else f"{int(tokens):,}",
        "-" if case.peak_memory_bytes is None else f"{case.peak_memory_bytes / 2**30:.3f} GiB",
        {None: "-", True: "yes", False: "NO"}[case.loss_finite],
        str(case.skipped_steps),
        str(case.non_finite_steps),
        case.parity or "-",
        percent(case.hidden_fraction),
        percent(case.hidden_gemm_attention_fraction),
    ]


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)]


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
