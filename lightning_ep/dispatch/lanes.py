"""Streams for libraries that exchange tokens on whatever stream is the current one.

A lane is such a stream, with the memory that is allocated in it. `record_stream`, which keeps freed memory from its next
use for longer than needed, is never called: instead a lane waits, before it allocates anything, for all that may still
read what was freed before.

    beside    waits for everything that the compute stream was given so far; its tensors may go anywhere
    ahead     waits for what is named only, so that the host need not wait for the other pass's kernels; its tensors stay
              with their exchange, which says when the compute stream was given the last kernel that reads them

Each lane waits for what the other has in flight: exchanges keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Done:
    """An exchange under way in a lane."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def wait(self) -> None:
        """The current stream waits for it."""
        if self.event is not None:
            self.event.wait()


class Lanes:
    """The two lanes beside the compute stream of one device; on the CPU everything runs where it stands."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self._streams = {name: torch.cuda.Stream(device, priority=-1) for name in ("ahead", "beside")}
            # Waiting for an event that was never recorded is no wait.
            self._last = {name: torch.cuda.Event() for name in self._streams}
            self._read = torch.cuda.Event()

    def mark(self) -> Done:
        """What the current stream was given so far."""
        return Done(self._recorded() if self.device.type == "cuda" else None)

    def all_read(self) -> None:
        """The current stream was given the last kernel that reads an exchange's tensors from the ahead lane."""
        if self.device.type == "cuda":
            self._read = self._recorded()

    @contextmanager
    def beside(self) -> Iterator[Done]:
        """Run in the lane `beside`; wait for the result once the block is left."""
        with self._lane("beside", "ahead", self.mark().event) as done:
            yield done

    @contextmanager
    def ahead(self, ready: Done) -> Iterator[Done]:
        """Run in the lane `ahead`, as soon as `ready` is."""
        with self._lane("ahead", "beside", ready.event) as done:
            yield done

    @contextmanager
    def _lane(self, name: str, other: str, ready: torch.cuda.Event | None) -> Iterator[Done]:
        done = Done(None)
        if ready is None:
            yield done
            return
        stream = self._streams[name]
        for event in (ready, self._last[other], self._read):
            stream.wait_event(event)
        with torch.cuda.stream(stream), _fresh_memory_left_alone():
            yield done
            done.event = self._last[name] = self._recorded()

    @staticmethod
    def _recorded() -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event


@contextmanager
def _fresh_memory_left_alone() -> Iterator[None]:
    """Under deterministic algorithms torch fills fresh memory, on the current stream. A library that has a stream of
    its own inside writes it at the same time: whole, so nothing has to be filled."""
    if not torch.are_deterministic_algorithms_enabled() or not torch.utils.deterministic.fill_uninitialized_memory:
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
