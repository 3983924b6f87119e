"""Interval arithmetic against a brute force over every point of a small line."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ep.profiling.intervals import clip, difference, intersection, measure, union

LINE = range(-3, 25)

# Small coordinates, so that touching, nested, equal and empty intervals are the rule.
point = st.integers(LINE.start, LINE.stop - 1)
interval = st.tuples(point, point).map(sorted).map(tuple)
interval_set = st.lists(interval, max_size=12)


def points(rows) -> set[int]:
    return {x for start, end in rows for x in range(start, end)}


def assert_merged(rows: np.ndarray) -> None:
    assert rows.dtype == np.int64 and rows.shape[1] == 2
    assert (rows[:, 0] < rows[:, 1]).all()
    assert (rows[1:, 0] > rows[:-1, 1]).all(), "sorted, disjoint and not touching"


@given(interval_set)
def test_union_and_measure(a):
    assert_merged(union(a))
    assert points(union(a)) == points(a)
    assert measure(a) == len(points(a))


@given(interval_set, interval_set)
def test_intersection_and_difference(a, b):
    both, only_a = intersection(a, b), difference(a, b)
    assert_merged(both)
    assert_merged(only_a)
    assert points(both) == points(a) & points(b)
    assert points(only_a) == points(a) - points(b)
    assert measure(both) + measure(only_a) == measure(a)
    assert (intersection(b, a) == both).all()


@given(interval_set, point, point)
def test_clip(a, start, end):
    assert_merged(clip(a, start, end))
    assert points(clip(a, start, end)) == points(a) & set(range(start, end))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([], [], id="empty"),
        pytest.param([(5, 5)], [], id="zero length"),
        pytest.param([(0, 2), (2, 4)], [(0, 4)], id="touching"),
        pytest.param([(0, 9), (2, 3), (4, 5)], [(0, 9)], id="nested"),
        pytest.param([(6, 7), (0, 1)], [(0, 1), (6, 7)], id="unsorted"),
        pytest.param([(0, 1), (1, 1), (3, 3), (3, 4)], [(0, 1), (3, 4)], id="zero length at the edges"),
    ],
)
def test_union_cases(rows, expected):
    assert union(rows).tolist() == [list(row) for row in expected]


def test_million_intervals_equal_the_closed_form():
    n = 1_000_000
    starts = np.random.default_rng(0).permutation(n) * 10
    comm = np.stack((starts, starts + 6), axis=1)
    compute = comm + 4
    assert measure(comm) == 6 * n
    assert measure(intersection(comm, compute)) == 2 * n
    assert measure(np.concatenate((comm, compute))) == 10 * n


def test_large_nanosecond_times_are_exact():
    base = 1_785_000_000_000_000_000
    assert measure([(base, base + 1), (base + 1, base + 3)]) == 3


@pytest.mark.parametrize("rows", [[(1, 2), (4, 3)], [1, 2, 3], [[1, 2, 3]]])
def test_what_is_no_interval_set_is_refused(rows):
    with pytest.raises(ValueError, match="intervals"):
        union(rows)
