"""Recorded training runs (JSON lines) and how two of them compare.

The first line is `{"header": {...}}` with what must agree between two runs, each further line one optimizer step:
`{"step": 7, "loss": 2.1, "lr": [0.001], "grad_norm": 0.9, "skipped": false, "finite": true}`. `loss` is the mean over
micro-batches and ranks; it and `grad_norm` are null where they are not finite, or unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

_MAX_LINE = 1 << 16
_MAX_LINES = 10_000_000

# Relative deviation of a step's loss that rounding explains, by precision; overlap itself changes no bit.
TOLERANCES = {"64": 1e-12, "32": 2e-6, "16": 1e-3, "bf16": 5e-3, "transformer-engine": 2e-2}
# A gradient norm adds up many more roundings than a loss.
_NORM_FACTOR = 10

# Header entries that two runs must share, and how an error calls them.
MUST_AGREE = {"seed": "seed", "global_batch_size": "global batch size", "steps": "length (optimizer steps)"}


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int
    loss: float | None
    lr: list[float]
    grad_norm: float | None
    skipped: bool
    finite: bool

    def to_line(self) -> str:
        return json.dumps(asdict(self), allow_nan=False) + "\n"


@dataclass(frozen=True)
class ParityReport:
    """How a run compares with its baseline, so far."""

    compared: int  # steps that both have
    missing: int  # steps that the baseline does not have
    tolerance: float
    max_deviation: float  # relative, of the loss
    mean_deviation: float
    first_divergent_step: int | None
    reason: str = ""  # what diverged there

    @property
    def ok(self) -> bool:
        return self.first_divergent_step is None

    def __str__(self) -> str:
        text = (
            f"{self.compared} steps compared, deviation of the loss at most {self.max_deviation:.3g}, "
            f"{self.mean_deviation:.3g} on average (tolerance {self.tolerance:.3g})"
        )
        if self.missing:
            text += f"; {self.missing} steps are not in the baseline"
        return text if self.ok else f"diverged at step {self.first_divergent_step}: {self.reason}; {text}"


class Parity:
    """Compares steps as they come; `report` is the state of it."""

    def __init__(self, baseline: Mapping[int, StepRecord], tolerance: float) -> None:
        self.baseline, self.tolerance = baseline, tolerance
        self._deviations: list[float] = []
        self._missing = 0
        self._first: tuple[int, str] | None = None

    def add(self, record: StepRecord) -> None:
        expected = self.baseline.get(record.step)
        if expected is None:
            self._missing += 1
            return
        deviation = _relative(record.loss, expected.loss)
        self._deviations.append(deviation)
        reason = self._difference(record, expected, deviation)
        if reason and self._first is None:
            self._first = (record.step, reason)

    def _difference(self, record: StepRecord, expected: StepRecord, deviation: float) -> str:
        for name in ("skipped", "finite"):
            ours, theirs = getattr(record, name), getattr(expected, name)
            if ours != theirs:
                return f"{name} is {ours}, in the baseline {theirs}"
        if deviation > self.tolerance:
            return f"loss {record.loss!r}, in the baseline {expected.loss!r} (deviation {deviation:.3g})"
        if None not in (record.grad_norm, expected.grad_norm):
            norm_deviation = _relative(record.grad_norm, expected.grad_norm)
            if norm_deviation > _NORM_FACTOR * self.tolerance:
                return (
                    f"gradient norm {record.grad_norm!r}, in the baseline {expected.grad_norm!r} "
                    f"(deviation {norm_deviation:.3g})"
                )
        return ""

    @property
    def report(self) -> ParityReport:
        finite = [d for d in self._deviations if d != float("inf")]
        return ParityReport(
            compared=len(self._deviations),
            missing=self._missing,
            tolerance=self.tolerance,
            max_deviation=max(self._deviations, default=0.0),
            mean_deviation=sum(finite) / len(finite) if finite else 0.0,
            first_divergent_step=self._first[0] if self._first else None,
            reason=self._first[1] if self._first else "",
        )


def compare_runs(records: Iterable[StepRecord], baseline: Mapping[int, StepRecord], tolerance: float) -> ParityReport:
    """The report on a whole recorded run."""
    parity = Parity(baseline, tolerance)
    for record in records:
        parity.add(record)
    return parity.report


def tolerance_for(*precisions: str | None) -> float:
    """The tolerance of the coarsest of some Lightning precisions ("bf16-mixed"); an unknown one counts as 32 bits."""
    return max(
        next((value for prefix, value in TOLERANCES.items() if str(p).startswith(prefix)), TOLERANCES["32"])
        for p in precisions
    )


def header_differences(ours: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """One sentence for each entry that makes the two runs incomparable."""
    return [
        f"{label} is {ours.get(key)!r} here and {baseline.get(key)!r} in the baseline"
        for key, label in MUST_AGREE.items()
        if ours.get(key) != baseline.get(key)
    ]


def read_run(path: str | Path) -> tuple[dict[str, Any], dict[int, StepRecord]]:
    """Header and steps of a recorded run. A last line without its end (a killed writer) is left out.

    Raises:
        ValueError: not such a file; the line is named.
    """
    path = Path(path)
    records: dict[int, StepRecord] = {}
    header: dict[str, Any] | None = None
    try:
        with path.open("r", encoding="utf-8") as file:
            for number in range(1, _MAX_LINES + 1):
                line = file.readline(_MAX_LINE)
                if not line.endswith("\n"):
                    if len(line) >= _MAX_LINE:
                        raise ValueError(f"{path}, line {number}: longer than {_MAX_LINE} characters")
                    break
                if header is None:
                    header = _parse_header(line)
                else:
                    record = _parse_record(line)
                    records[record.step] = record
            else:
                raise ValueError(f"{path}: more than {_MAX_LINES} lines")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, TypeError, KeyError, RecursionError, UnicodeDecodeError) as error:
        where = 1 if header is None else len(records) + 2
        raise ValueError(f"{path}, line {where}: not a recorded run of LossParity: {error}") from error
    if header is None:
        raise ValueError(f"{path}: empty; a recorded run starts with a header line")
    return header, records


def _parse_header(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("header"), dict):
        raise TypeError("the first line must be a header")
    return row["header"]


def _parse_record(line: str) -> StepRecord:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError(f"expected an object, found {row!r:.40}")
    record = StepRecord(**{field.name: row[field.name] for field in fields(StepRecord)})
    numbers = [record.step, *record.lr, *(v for v in (record.loss, record.grad_norm) if v is not None)]
    if not all(isinstance(n, int | float) for n in numbers) or isinstance(record.step, float):
        raise TypeError(f"step {record.step!r}: step, loss, lr and grad_norm must be numbers")
    return record


def _relative(value: float | None, expected: float | None) -> float:
    if value is None or expected is None:
        return 0.0 if value is expected else float("inf")
    return abs(value - expected) / max(abs(expected), 1e-30) if value != expected else 0.0
