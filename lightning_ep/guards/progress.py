"""Where this rank is: a record that costs two attribute stores an exchange and is read only when something is wrong.

The dispatchers' legs and the strategy's collectives note themselves here; the watch (`watch.py`) reads it from another
thread, to tell a rank that moves from one that waits, and to say in an error where ranks waited.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


class Progress:
    """The last step of this rank's way.

    Attributes:
        count: rises with every note; the same on all ranks that did the same.
        place: what the last note was about, a pair (operation, layer or None).
        waiting: whether the host may be waiting for other ranks there.
    """

    __slots__ = ("count", "place", "waiting")

    def __init__(self) -> None:
        self.count, self.waiting = 0, False
        self.place: tuple[str, int | None] = ("start", None)

    def enter(self, place: tuple[str, int | None]) -> None:
        """The host goes where it may have to wait for other ranks."""
        self.place, self.waiting = place, True
        self.count += 1

    def leave(self) -> None:
        self.waiting = False
        self.count += 1

    @contextmanager
    def at(self, operation: str) -> Generator[None, None, None]:
        """For the rare ones: barriers, reductions, checkpoints."""
        self.enter((operation, None))
        try:
            yield
        finally:
            self.leave()

    def describe(self) -> str:
        operation, layer = self.place
        where = operation if layer is None else f"{_LEGS.get(operation, operation)} of MoE layer {layer}"
        return f"waiting in {where}" if self.waiting else f"computing after {where}"


_LEGS = {
    "dispatch": "the dispatch",
    "combine": "the combine",
    "dispatch_bwd": "the backward of the dispatch",
    "combine_bwd": "the backward of the combine",
}

# One a process: a rank is at one place.
progress = Progress()
