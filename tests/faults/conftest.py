from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.cases import CASES
from tests.faults.page import page
from tests.faults.table import Table

_table = Table()


@pytest.fixture
def table() -> Table:
    return _table


@pytest.fixture
def slack() -> float:
    """How much longer everything may take here than on an idle machine."""
    return float(os.environ.get("FAULT_SLACK", "1"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A complete and successful run writes the page."""
    if exitstatus == 0 and all(case.id in _table.rows for case in CASES):
        Path(session.config.rootpath, "docs", "reliability.md").write_text(page(_table))
