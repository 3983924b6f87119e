"""What an A/B comparison will run: cases, the steady window, and the command line of each run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STRATEGY = "trainer.strategy.init_args."
# What each step costs must be all that is measured.
_FIXED = (
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.limit_val_batches=0",
    "--trainer.num_sanity_val_steps=0",
)
_RECORDER = "lightning_ep.bench.recorder.StepRecorder"
_PARITY = "lightning_ep.callbacks.LossParity"
_OVERLAP = "lightning_ep.callbacks.OverlapMetrics"
PROFILED_STEPS = 3
THIS_PYTHON = (sys.executable, "-m", "lightning_ep")


@dataclass(frozen=True)
class Case:
    """One setting of everything that is varied. `overrides`: ((config key, value), ...)."""

    name: str
    overrides: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Axis:
    """One thing that is varied: (label, overrides) of each of its settings."""

    settings: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True)
class Plan:
    """A whole comparison. Steps `first` to `last` (counted from 1, both included) are the steady window."""

    configs: tuple[str, ...]
    cases: tuple[Case, ...]
    first: int
    last: int
    repeats: int
    seed: int
    profile: bool
    extra: tuple[str, ...] = ()
    program: tuple[str, ...] = THIS_PYTHON

    def command(self, case: Case, folder: Path, profiled: bool = False) -> list[str]:
        """The command line of one run, which leaves its records in `folder`."""
        steps = self.last
        callbacks = [_RECORDER, ("path", folder / "steps.json"), _PARITY, ("path", folder / "losses.jsonl")]
        callbacks += [("flush_every", self.last)]
        if profiled:
            # From the first steady step on; one step to warm the profiler up.
            steps = self.first + PROFILED_STEPS
            callbacks += [_OVERLAP, ("wait", self.first - 1), ("warmup", 1), ("active", PROFILED_STEPS)]
            callbacks += [("dirpath", folder)]
        return [
            *self.program,
            "fit",
            *(f"--config={path}" for path in self.configs),
            f"--seed_everything={self.seed}",
            f"--trainer.max_steps={steps}",
            f"--trainer.default_root_dir={folder}",
            *_FIXED,
            *([] if self._has_checkpoints() else ["--trainer.enable_checkpointing=false"]),
            *self.extra,
            *(f"--{key}={value}" for key, value in case.overrides),
            *(
                f"--trainer.callbacks+={item}" if isinstance(item, str) else f"--trainer.callbacks.{item[0]}={item[1]}"
                for item in callbacks
            ),
        ]

    def order(self) -> list[tuple[int, Case]]:
        """(repeat, case) of the timed runs: alternated, every other repeat backwards, so that drift hits all alike."""
        return [
            (repeat, case)
            for repeat in range(self.repeats)
            for case in (self.cases if repeat % 2 == 0 else tuple(reversed(self.cases)))
        ]

    def _has_checkpoints(self) -> bool:
        """A config that names a checkpoint callback forbids switching checkpoints off."""
        return any("Checkpoint" in Path(path).read_text(encoding="utf-8") for path in self.configs)


def parse_vary(text: str) -> Axis:
    """`KEY=V1,V2`: KEY is an argument of the strategy, or a dotted key of the config.

    Raises:
        ValueError: no such form.
    """
    key, separator, values = text.partition("=")
    if not separator or not key or not all(values.split(",")):
        raise ValueError(
            f"--vary {text!r}: write KEY=VALUE,VALUE, for example overlap_moe_expert_parallel_comm=false,true"
        )
    full = key if "." in key else _STRATEGY + key
    return Axis(tuple((f"{key}={value}", ((full, value),)) for value in values.split(",")))


def parse_a2a_overlap(text: str) -> Axis:
    """`--moe_a2a_overlap`: overlap and delayed weight gradients set together."""
    values = text.split(",")
    if not set(values) <= {"true", "false"}:
        raise ValueError(f"--moe_a2a_overlap {text!r}: write true, false, or false,true")
    keys = (_STRATEGY + "overlap_moe_expert_parallel_comm", _STRATEGY + "delay_wgrad_compute")
    return Axis(tuple((f"moe_a2a_overlap={value}", tuple((key, value) for key in keys)) for value in values))


def parse_steady(text: str) -> tuple[int, int]:
    """`5:20` as (5, 20).

    Raises:
        ValueError: no such form, or a window without enough steps; it says why.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError(f"--steady {text!r}: write FIRST:LAST, for example 5:20")
    if not 2 <= int(first) < int(last):
        raise ValueError(f"--steady {text!r}: needs 2 <= FIRST < LAST; step 1 compiles and allocates")
    return int(first), int(last)


def cases_of(axes: Sequence[Axis]) -> tuple[Case, ...]:
    """Every combination; the first is the baseline. Where two axes set the same key, the later one wins."""
    cases = []
    for combination in itertools.product(*(axis.settings for axis in axes)):
        overrides: dict[str, str] = {}
        for _, settings in combination:
            overrides |= dict(settings)
        cases.append(Case(", ".join(label for label, _ in combination), tuple(overrides.items())))
    return tuple(cases)
