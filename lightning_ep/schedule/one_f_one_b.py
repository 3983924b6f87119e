"""1f1b: the backward of micro-batch i takes turns with the forward of micro-batch i+1.

The strategy parks a backward that is not the last of its accumulation window; the next `training_step` runs it in a
second thread. One MoE layer of each pass, with the backward a turn ahead:

    comm      combine bwd        | dispatch fwd, dispatch bwd             | combine fwd
    compute   attention fwd      | experts dgrad, wgrad, experts fwd      | attention bwd

The autograd engine runs a backward's CUDA nodes on its own device thread; a node that waits for its turn blocks that
thread without holding the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from lightning_ep.schedule.turns import BACKWARD, FORWARD, PassAborted, TwoThreads, activate


class Backward(Protocol):
    """A backward that can wait: hooks before and after in the main thread, the pass itself in another."""

    def before(self) -> None: ...

    def run(self) -> None: ...

    def after(self) -> Any: ...


class OneFOneB:
    """Runs parked backwards beside forwards; the numbers are those of running them one after the other."""

    def __init__(self) -> None:
        self._parked: Backward | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lightning_ep-backward")

    @property
    def is_parked(self) -> bool:
        return self._parked is not None

    def park(self, backward: Backward) -> None:
        """Keep a backward for the next forward."""
        assert self._parked is None, "a backward is parked already; its forward never came"
        self._parked = backward

    def drop(self) -> None:
        """Forget a parked backward: training ended or failed before its partner came."""
        self._parked = None

    @contextmanager
    def forward_turns(self) -> Generator[None, None, None]:
        """The forward inside takes turns with the parked backward, which is complete on leaving.

        An exception of either pass ends both. The one that came first is raised here, with its own traceback.
        """
        if self._parked is None:
            yield
            return
        backward, self._parked = self._parked, None
        backward.before()
        turns = TwoThreads()
        activate(turns)
        running = self._thread.submit(_take_turns, turns, backward.run, _current_stream())
        try:
            turns.wait_for_first_turn(FORWARD)
            yield
        except BaseException as error:
            turns.leave(FORWARD, error)
            self._finish(running)
            if isinstance(error, PassAborted) and turns.error is not None:
                raise turns.error from None
            raise
        else:
            turns.leave(FORWARD)
            self._finish(running)
            if turns.error is not None:
                raise turns.error
            backward.after()

    @staticmethod
    def _finish(running: Future) -> None:
        running.exception()  # waits; the error itself is in `turns`
        activate(None)

    def close(self) -> None:
        self.drop()
        self._thread.shutdown()


def _take_turns(turns: TwoThreads, backward: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
    error: BaseException | None = None
    try:
        # A new thread has its own current device and stream.
        if stream is not None:
            torch.cuda.set_device(stream.device)
            with torch.cuda.stream(stream):
                backward()
        else:
            backward()
    except BaseException as caught:
        error = caught
    finally:
        turns.leave(BACKWARD, error)


def _current_stream() -> torch.cuda.Stream | None:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None
