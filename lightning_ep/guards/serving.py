"""Ranks without a batch serve their experts: evaluation and prediction see every sample, on however many ranks.

    rank 0   step 1   step 2   step 3           a rank that is still in its loader announces every exchange of its
    rank 1   step 1   serve    serve            step to those of its EP group that are not, and they take part in it
    rank 2   step 1   step 2   serve            with no tokens of their own; none of the user's code runs there

The first rank with a batch leads its EP group. Nothing is announced while all ranks have batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_ep.experts.parallel import forward_observers
from lightning_ep.guards.agreement import Pending, SideGroup

# What is announced: a layer's exchange with this hidden size, top-k and dtypes; or a layer of -1, the end of a step.
_WORDS = 5
_END_OF_STEP = [-1] * _WORDS
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Takes part in one exchange without tokens: (layer, hidden size, top-k, tokens' dtype, weights' dtype).
Serve = Callable[[int, int, int, torch.dtype, torch.dtype], None]


class Attendance:
    """Which ranks have a batch for step 1, 2, ... of one pass over one loader.

    Args:
        lengths: each rank's number of steps; None where ranks do not know, and tell each other one step ahead.
    """

    def __init__(self, side: SideGroup, lengths: list[int] | None, limit: float) -> None:
        self.side, self.lengths, self.limit = side, lengths, limit
        self.step = 0
        self.total: float | None = lengths[side.rank] if lengths is not None else None
        self._coming: Pending | None = None

    def has(self, step: int) -> bool:
        """Whether this rank has a batch for `step`, at most one more than it has taken from its loader."""
        return step <= self.limit and (self.total is None or step <= self.total)

    def start(self) -> None:
        """Tell the others whether there is a first batch."""
        self._tell(1)

    def _tell(self, step: int) -> None:
        if self.lengths is None:
            flags = [0] * self.side.size
            flags[self.side.rank] = int(self.has(step))
            self._coming = self.side.start_sum(flags)

    def next(self) -> list[int]:
        """Begin the next step: the ranks that have a batch for it."""
        self.step += 1
        if self.lengths is not None:
            return [r for r, n in enumerate(self.lengths) if self.step <= min(n, self.limit)]
        assert self._coming is not None
        present = [r for r, has in enumerate(self._coming.read()) if has]
        if present:
            self._tell(self.step + 1)
        return present


class Serving:
    """Keeps the ranks of an EP group together while some have run out of batches.

    Args:
        ep_ranks: global ranks of this rank's EP group.
        serve: takes part in one exchange.
    """

    def __init__(self, side: SideGroup, ep_ranks: list[int], serve: Serve) -> None:
        self.side, self.ep_ranks, self.serve = side, ep_ranks, serve
        self._steps: deque[Attendance] = deque()
        self._running = False
        self._late: list[Attendance] = []
        self._absent: list[int] = []

    # -- from the loaders

    def taken(self, attendance: Attendance) -> None:
        """A batch was taken from a loader; its step will come."""
        self._steps.append(attendance)

    def nothing_to_do(self, attendance: Attendance) -> None:
        """This rank has no batch at all. Lightning may take the first batch before the loop begins."""
        if self._running:
            self._serve_until_all_are_done(attendance)
        else:
            self._late.append(attendance)

    # -- from the strategy

    def on_start(self) -> None:
        self._running = True
        while self._late:
            self._serve_until_all_are_done(self._late.pop(0))

    def on_end(self) -> None:
        self._running = False
        self._steps.clear()

    @contextmanager
    def step(self) -> Generator[bool, None, None]:
        """Around a step of the module; yields whether ranks may differ in this loader."""
        attendance = self._steps.popleft() if self._steps else None
        if attendance is None:
            yield False
            return
        present = [r for r in attendance.next() if r in self.ep_ranks]
        absent = [r for r in self.ep_ranks if r not in present]
        leads = bool(absent) and present[0] == self.side.rank
        if leads:
            self._absent = absent
            forward_observers.append(self._announce)
        try:
            yield True
        finally:
            if leads:
                forward_observers.remove(self._announce)
        if leads:
            self._tell(_END_OF_STEP)
        if not attendance.has(attendance.step + 1):
            self._serve_until_all_are_done(attendance)

    # -- the two sides of an announcement

    def _announce(self, layer: int, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> None:
        dtypes = [_DTYPES.index(x_TD.dtype), _DTYPES.index(weights_TK.dtype)]
        self._tell([layer, x_TD.shape[1], experts_TK.shape[1], *dtypes])

    def _tell(self, words: list[int]) -> None:
        for rank in self._absent:
            self.side.send(words, rank)

    def _serve_until_all_are_done(self, attendance: Attendance) -> None:
        while present := attendance.next():
            leaders = [r for r in present if r in self.ep_ranks]
            while leaders and (words := self.side.receive(_WORDS, leaders[0])) != _END_OF_STEP:
                layer, hidden, slots, dtype, weights_dtype = words
                self.serve(layer, hidden, slots, _DTYPES[dtype], _DTYPES[weights_dtype])
