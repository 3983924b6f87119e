"""The rows of docs/reliability.md: what was seen, how long it took, what is left."""

from __future__ import annotations

import re

from tests.faults.cases import Case
from tests.faults.processes import End

HEAD = "| fault | what the user sees | seconds to end | exit codes | what is kept |\n|---|---|---|---|---|"
_LONGEST = 320


class Table:
    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def add(self, case: Case, ends: list[End]) -> None:
        codes = ", ".join("stopped" if rank in case.stopped else str(end.code) for rank, end in enumerate(ends))
        cells = (case.title, _seen(case, ends), _seconds(case, ends), codes, case.kept or "nothing was begun")
        self.rows[case.id] = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _seconds(case: Case, ends: list[End]) -> str:
    seconds = max(end.seconds for rank, end in enumerate(ends) if rank not in case.stopped)
    if case.options.get("fault") is not None:
        return f"{seconds:.1f}"
    return f"{seconds:.1f} after the start" if any(end.code for end in ends) else "goes on"


def _seen(case: Case, ends: list[End]) -> str:
    """The message as an innocent rank printed it, without what differs from run to run."""
    if not case.sees:
        return "a clean end" if not any(end.code for end in ends) else "Lightning's message for Ctrl-C"
    output = ends[case.innocent[0]].output
    found = re.search(case.sees, output)
    assert found is not None
    start = output.rfind("\n", 0, found.start()) + 1
    end = output.find("\n", found.end())
    return f"`{shortened(' '.join(output[start:end].split()))}`"


def shortened(text: str) -> str:
    text = re.sub(r"\[rank\d+\]:(\[[^]]*\])? ?", "", text)
    text = re.sub(r"^\S+\.py:\d+: (\w+Warning: )?", "", text)  # where a warning was given
    text = re.sub(r"^(\S*: )?(?:\w+\.)+(\w+(?:Error|Exception):)", r"\2", text)  # the module of an exception
    text = re.sub(r" \(\w+: \[\S*gloo.*$", "", text)  # how the connection broke
    text = re.sub(r" The traceback of the cause is in the output of rank \d+\.", "", text)
    text = re.sub(r"pid \d+( on [^\s,;)]+)?", r"pid 4711", text)
    text = re.sub(r"Process \d+", "Process 4711", text)
    text = re.sub(r"/\S*/", "", text).replace("`", "'")
    return text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " ..."
