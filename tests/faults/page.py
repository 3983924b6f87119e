"""docs/reliability.md, from the rows of a whole run of the fault suite."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import lightning
import torch

from tests.faults.cases import SHORT, TABLES
from tests.faults.table import HEAD, Table

_INTRODUCTION = """\
# Reliability

Written by `make faults`, which runs every row with real processes (gloo, 2 to 4 ranks) and checks it: the exit codes, the
message, the time, that no process and no shared memory is left, and that what was saved loads. Change
`tests/faults/cases.py` instead of this page.

Ranks of an expert-parallel job need each other in every layer, so one that is missing, late or elsewhere would make the
others wait forever. With `EPOverlapStrategy` such a case either works, or ends on all ranks with the cause:

- A rank that **raises** tells the others; each of them raises a RuntimeError (`PeerError`, if its connection still
  held) with the rank and its error, and where it waited. The traceback is in the output of the rank that raised.
- A rank that **dies** is missed by its neighbours within about a second if they are on one machine. One that is
  **stopped or hangs**, or dies on another machine, is missed after 80% of the strategy's `timeout`
  (`EPOverlapStrategy(timeout=timedelta(minutes=10))` unless you say otherwise: longer than any compile). Rows that
  wait for it ran with {short} seconds, the others with a time-out that would have failed them.
- **Signals, stopping, validation by the clock**: ranks agree after each batch, so all of them act after the same one.
- **Data**: an epoch of training ends with the first rank that has no more batches (`uneven_data="stop"`), or is refused
  (`"error"`). In evaluation and prediction every rank sees all of its batches; one without serves its experts.
- **Ranks that differ** in code, options or model are told so before they exchange anything else.
- **NaN or infinity** in a router stops the job in the layer where it shows, and weights with NaN are not saved.
- **Checkpoints** appear at once and whole, or not at all, and no code in them is ever executed. The tests in
  `tests/checkpoint/test_under_fire.py` kill a save at each of its steps and damage every file of a checkpoint.

Measured on {machine}{slack}.
Seconds count from the fault to the end of the last rank. Something happens to rank 1 unless a row says another; exit
codes are in order of rank (under a launcher: its own), negative for a signal. The messages here are without pids, hosts,
folders and tracebacks, and long ones are cut.
"""


def page(table: Table) -> str:
    slack = float(os.environ.get("FAULT_SLACK", "1"))
    busy = "" if slack == 1 else f", busy with other work (limits x {slack:g})"
    parts = [_INTRODUCTION.format(short=SHORT, machine=_machine(), slack=busy)]
    for title, cases in TABLES.items():
        parts.append("\n".join([f"## {title}\n", HEAD, *(table.rows[case.id] for case in cases)]) + "\n")
    return "\n".join(parts)


def _machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = names[0].split(":", 1)[1].strip() if names else platform.machine()
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}"
    return f"{os.cpu_count()} cores ({name}; Python {platform.python_version()}, {versions})"
