"""One way in for every kind of trace file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning_ep.profiling.attribution import kernel_tables
from lightning_ep.profiling.kernels import KernelTable
from lightning_ep.profiling.kineto import read_kineto
from lightning_ep.profiling.nsys import read_nsys
from lightning_ep.profiling.rules import DEFAULT_RULES, Rule


def read_trace(path: str | Path, rules: Iterable[Rule] = DEFAULT_RULES) -> list[KernelTable]:
    """The kernel tables of a trace file, one for each (process, GPU) in it; the kind is told by the first bytes.

    Raises:
        ValueError: unreadable, of another kind, or malformed; the message names file, position and what to do.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise ValueError(f"{path}: export it first: nsys export --type sqlite {path.name}")
    if not head:
        raise ValueError(f"{path}: the file is empty")
    is_sqlite = head.startswith(b"SQLite format 3\0")
    raw = read_nsys(path) if is_sqlite else read_kineto(path)
    return kernel_tables(raw, rules)
