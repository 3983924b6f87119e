"""Arithmetic on sets of time intervals, vectorized over millions of them.

An interval set is an integer array `[N, 2]` of half-open `[start, end)` rows, in any order, overlapping or not; the
unit is the caller's (nanoseconds everywhere in this package). Functions that return a set return it **merged**: sorted,
disjoint, no two rows touching, no empty row. Merged sets are what a time line of "something ran" means, which is why
overlap is measured on them and never on sums of durations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Intervals = NDArray[np.int64]


def as_intervals(intervals: ArrayLike) -> Intervals:
    """`intervals` as an int64 array `[N, 2]`.

    Raises:
        ValueError: another shape, or a row that ends before it starts (the row is named).
    """
    array = np.asarray(intervals, dtype=np.int64)
    if array.size == 0:
        return np.empty((0, 2), dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"intervals has shape {array.shape}; pass rows of (start, end), shape [N, 2]")
    backwards = np.flatnonzero(array[:, 1] < array[:, 0])
    if len(backwards):
        row = int(backwards[0])
        raise ValueError(f"intervals[{row}]={tuple(map(int, array[row]))} ends before it starts; swap its two values")
    return array


def union(intervals: ArrayLike) -> Intervals:
    """The points covered by at least one interval, merged."""
    array = as_intervals(intervals)
    array = array[array[:, 1] > array[:, 0]]
    if len(array) == 0:
        return array
    array = array[np.argsort(array[:, 0], kind="stable")]
    covered_until = np.maximum.accumulate(array[:, 1])
    first = np.concatenate(([True], array[1:, 0] > covered_until[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((array[first, 0], covered_until[last]), axis=1)


def intersection(a: ArrayLike, b: ArrayLike) -> Intervals:
    """The points covered by both `a` and `b`, merged."""
    return _sweep(a, b, in_b=1)


def difference(a: ArrayLike, b: ArrayLike) -> Intervals:
    """The points covered by `a` and not by `b`, merged."""
    return _sweep(a, b, in_b=0)


def measure(intervals: ArrayLike) -> int:
    """Length of the union, in the unit of the input."""
    merged = union(intervals)
    return int((merged[:, 1] - merged[:, 0]).sum())


def clip(intervals: ArrayLike, start: int, end: int) -> Intervals:
    """The part of the union that lies in `[start, end)`, merged."""
    return union(np.clip(as_intervals(intervals), start, max(start, end)))


def _sweep(a: ArrayLike, b: ArrayLike, in_b: int) -> Intervals:
    """Walk over all boundaries of the merged sets and keep the stretches inside `a` where b's depth is `in_b`."""
    a, b = union(a), union(b)
    points = np.concatenate((a[:, 0], a[:, 1], b[:, 0], b[:, 1]))
    step_a = np.repeat(np.array([1, -1, 0, 0], dtype=np.int8), [len(a), len(a), len(b), len(b)])
    step_b = np.repeat(np.array([0, 0, 1, -1], dtype=np.int8), [len(a), len(a), len(b), len(b)])
    order = np.argsort(points, kind="stable")
    points = points[order]
    inside = (np.cumsum(step_a[order], dtype=np.int64) == 1) & (np.cumsum(step_b[order], dtype=np.int64) == in_b)
    # The last boundary opens nothing; equal boundaries give empty stretches, which union drops.
    inside = inside[:-1] if len(inside) else inside
    return union(np.stack((points[:-1][inside], points[1:][inside]), axis=1))
