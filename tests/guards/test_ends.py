"""The faults that are checked every time, with real processes; all of them: `make faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cases import CASES, Case, run

# CI machines are busy: times are checked by `make faults`.
SLACK = 8


@pytest.mark.parametrize("case", [case for case in CASES if case.fast], ids=lambda case: case.id)
def test_fault(case: Case, tmp_path: Path) -> None:
    run(case, tmp_path, SLACK)
