"""Every fault with real processes. `make faults` runs this and writes docs/reliability.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cases import CASES, Case, run
from tests.faults.table import Table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_fault(case: Case, tmp_path: Path, table: Table, slack: float) -> None:
    table.add(case, run(case, tmp_path, slack))
