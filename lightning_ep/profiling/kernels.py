"""The typed table that every trace becomes: one row a GPU activity, columns as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from lightning_ep.profiling.intervals import Intervals


class Category(IntEnum):
    """What a GPU activity is, for the question "does communication run beside compute?"."""

    UNKNOWN = 0  # no rule knew the name: counted as compute, and shown
    COMMUNICATION = 1
    GEMM = 2
    ATTENTION = 3
    COMPUTE = 4  # any other computation
    MEMORY = 5  # copies and memsets: neither communication nor compute


COMPUTE = (Category.GEMM, Category.ATTENTION, Category.COMPUTE, Category.UNKNOWN)
GEMM_AND_ATTENTION = (Category.GEMM, Category.ATTENTION)


@dataclass(frozen=True)
class KernelTable:
    """GPU activity of one process on one GPU, `N` rows sorted by start. Times are int64 nanoseconds."""

    source: str  # the file that it was read from
    rank: int | None
    process: int
    device: int
    names: tuple[str, ...]  # distinct names
    name_N: NDArray[np.int32]  # index into names
    stream_N: NDArray[np.int64]
    start_N: NDArray[np.int64]
    end_N: NDArray[np.int64]
    category_N: NDArray[np.int8]  # Category
    ranges: tuple[str, ...] = ()  # distinct range names, "ep/dispatch/3"
    range_N: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # index into ranges, or -1
    steps: Intervals = field(default_factory=lambda: np.empty((0, 2), np.int64))  # on the GPU's time line

    def __post_init__(self) -> None:
        if not len(self.range_N):
            object.__setattr__(self, "range_N", np.full(len(self.start_N), -1, np.int32))

    def __len__(self) -> int:
        return len(self.start_N)

    @property
    def label(self) -> str:
        """How reports call this trace."""
        where = f"rank {self.rank}" if self.rank is not None else f"process {self.process}" if self.process else ""
        return " ".join(part for part in (self.source, where, f"GPU {self.device}" if self.device else "") if part)

    def of(self, *categories: Category) -> NDArray[np.bool_]:
        """Mask `[N]` of the rows in any of `categories`."""
        return np.isin(self.category_N, [int(category) for category in categories])

    def intervals(self, mask: NDArray[np.bool_] | None = None) -> Intervals:
        """`[M, 2]` (start, end) of the rows in `mask`, or of all."""
        rows = slice(None) if mask is None else mask
        return np.stack((self.start_N[rows], self.end_N[rows]), axis=1)

    def counts_by_name(self) -> dict[str, int]:
        """Number of rows of each name; memory copies left out."""
        kernels = self.name_N[~self.of(Category.MEMORY)]
        counts = np.bincount(kernels, minlength=len(self.names))
        return {name: int(count) for name, count in zip(self.names, counts, strict=True) if count}
