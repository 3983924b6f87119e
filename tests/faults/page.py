from __future__ import annotations

from tests.faults.table import Table


def page(table: Table) -> str:
    return "\n".join(table.rows.values())
