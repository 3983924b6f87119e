"""Reads Nsight Systems SQLite exports (`nsys export --type sqlite report.nsys-rep`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from lightning_ep.profiling.attribution import Launches, RawTrace, Spans, known_span

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "Memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "Memset"}
# NVTX event types of a push/pop and of a start/end range.
_RANGE_TYPES = (59, 60)
# globalTid and globalPid carry the process in the bits above the thread's 24.
_THREAD_BITS = 24


def read_nsys(path: str | Path) -> RawTrace:
    """The GPU activities, launches and NVTX ranges of an export, of all its processes and GPUs.

    Columns that an export lacks (old versions, reduced exports) are taken as 0; only start, end and a name are needed.

    Raises:
        ValueError: no SQLite file, a damaged one, or one without kernels; the table is named.
    """
    path = Path(path)
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            return _read(_Export(db, path))
    except sqlite3.Error as error:
        raise ValueError(f"{path}: cannot be read as an Nsight Systems SQLite export: {error}") from error


class _Export:
    """An open export; knows which columns are there."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.db, self.path = db, path
        db.text_factory = lambda data: data.decode("utf-8", "replace")

    def columns(self, table: str) -> set[str]:
        """The columns of `table`; empty when there is no such table."""
        return {row[1] for row in self.db.execute(f"PRAGMA table_info({table})")}

    def integers(self, table: str, wanted: Sequence[str], where: str = "") -> list[np.ndarray]:
        """The `wanted` columns as int64; a missing column or a NULL is 0, for correlation ids -1 (none)."""
        have = self.columns(table)
        if not have:
            return [np.empty(0, np.int64) for _ in wanted]
        selected = ", ".join(_or_default(name, name in have) for name in wanted)
        rows = self.db.execute(f"SELECT {selected} FROM {table} {where}")
        try:
            flat = np.fromiter(_flat(rows), dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.path}: table {table} holds something other than integers: {error}") from error
        return list(np.ascontiguousarray(flat.reshape(-1, len(wanted)).T))

    def strings(self, ids: np.ndarray) -> list[str]:
        """The texts of StringIds for each of `ids`."""
        if not self.columns("StringIds"):
            raise ValueError(f"{self.path}: has no table StringIds, so kernels have no names; export it again")
        wanted = set(ids.tolist())
        found = {i: str(text) for i, text in self.db.execute("SELECT id, value FROM StringIds") if i in wanted}
        return [found.get(i, f"string {i}") for i in ids.tolist()]


def _or_default(column: str, exists: bool) -> str:
    default = -1 if column == "correlationId" else 0
    return f'COALESCE("{column}", {default})' if exists else str(default)


def _flat(rows: sqlite3.Cursor) -> Iterator[int]:
    while batch := rows.fetchmany(1 << 14):
        for row in batch:
            yield from row


def _read(export: _Export) -> RawTrace:
    columns = export.columns(_KERNELS)
    if not columns:
        raise ValueError(f"{export.path}: has no table {_KERNELS}; record with `nsys profile --trace cuda,nvtx`")
    if missing := {"start", "end"} - columns:
        raise ValueError(f"{export.path}: table {_KERNELS} has no column {', '.join(sorted(missing))}")
    name_column = next((name for name in ("demangledName", "shortName", "mangledName") if name in columns), None)
    if name_column is None:
        raise ValueError(f"{export.path}: table {_KERNELS} has no column demangledName or shortName")
    activity = ("globalPid", "deviceId", "streamId", "correlationId", "start", "end")
    name_ids, *kernels = export.integers(_KERNELS, (name_column, *activity))
    if not len(name_ids):
        raise ValueError(f"{export.path}: table {_KERNELS} is empty; no kernel ran while nsys recorded")
    distinct, name_N = np.unique(name_ids, return_inverse=True)
    names = export.strings(distinct)
    parts = [[name_N.astype(np.int64), *kernels]]
    for table, label in _COPIES.items():
        copies = export.integers(table, activity)
        parts.append([np.full(len(copies[0]), len(names), np.int64), *copies])
        names.append(label)
    name_N, process_N, device_N, stream_N, correlation_N, start_N, end_N = map(np.concatenate, zip(*parts, strict=True))
    if len(backwards := np.flatnonzero(end_N < start_N)):
        raise ValueError(
            f"{export.path}: GPU activity {int(backwards[0])} ends before it starts; the export is damaged"
        )
    thread_C, correlation_C, time_C = export.integers(_RUNTIME, ("globalTid", "correlationId", "start"))
    return RawTrace(
        source=export.path.name,
        rank=None,
        names=names,
        name_N=name_N,
        process_N=process_N >> _THREAD_BITS,
        device_N=device_N,
        stream_N=stream_N,
        correlation_N=correlation_N,
        start_N=start_N,
        end_N=end_N,
        launches=Launches(thread_C >> _THREAD_BITS, correlation_C, thread_C, time_C),
        host_spans=_nvtx(export),
    )


def _nvtx(export: _Export) -> Spans:
    """The NVTX ranges whose names we know; their text is in the row or, for registered strings, in StringIds."""
    have = export.columns("NVTX_EVENTS")
    if not {"start", "end"} <= have:
        return Spans()
    text = "n.text" if "text" in have else "NULL"
    join = ""
    if "textId" in have and export.columns("StringIds"):
        text, join = f"COALESCE({text}, s.value)", "LEFT JOIN StringIds s ON s.id = n.textId"
    thread = "COALESCE(n.globalTid, 0)" if "globalTid" in have else "0"
    kind = f"AND n.eventType IN {_RANGE_TYPES}" if "eventType" in have else ""
    names: dict[str, int] = {}
    rows = []
    for name, lane, start, end in export.db.execute(
        f'SELECT {text}, {thread}, n.start, n."end" FROM NVTX_EVENTS n {join} WHERE n."end" IS NOT NULL {kind}'
    ):
        if (name := known_span(name)) is not None:
            rows.append((names.setdefault(name, len(names)), lane, start, end))
    return Spans(list(names), *np.array(rows, np.int64).reshape(-1, 4).T)
