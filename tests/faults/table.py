"""The table of docs/reliability.md: what was seen, how long it took, what is left."""

from __future__ import annotations

import re

from tests.faults.cases import Case
from tests.faults.processes import End


class Table:
    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def add(self, case: Case, ends: list[End]) -> None:
        seconds = max(end.seconds for rank, end in enumerate(ends) if rank not in case.stopped)
        codes = ", ".join("stopped" if rank in case.stopped else str(end.code) for rank, end in enumerate(ends))
        cells = (case.title, _seen(case, ends), f"{seconds:.1f}", codes, case.kept)
        self.rows[case.id] = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _seen(case: Case, ends: list[End]) -> str:
    """The message as an innocent rank printed it."""
    if not case.sees:
        return "a clean end" if not any(end.code for end in ends) else "KeyboardInterrupt"
    output = ends[case.innocent[0]].output
    found = re.search(case.sees, output)
    assert found is not None
    start = output.rfind("\n", 0, found.start()) + 1
    end = output.find("\n", found.end())
    text = " ".join(re.sub(r"^\[rank\d+\]: ", "", line).strip() for line in output[start:end].splitlines())
    text = re.sub(r"pid \d+ on \S+?(?=[,;)])", "pid 4711 on node0", text)
    text = re.sub(r"/\S*/", "", text)
    return f"`{text[:400]}`"
