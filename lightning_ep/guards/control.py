"""Control flow that ranks must share: stopping, signals, validation by the clock, skipping an epoch's rest.

Any of them may come to one rank first. After each batch every rank starts a sum of its wishes over all hosts and reads
the one that it started a batch before, so nobody waits:

    batch           k                 k+1               k+2
    rank 0     ... start, read   ... start, read   ... start, read   <- here all learn of the wish of k+1 and leave
    rank 1     ... start, read   ... start, read   ... start, read
                             SIGTERM ^

A rank that wants to stop has time: it reads its own batch's sum at once, and when all want to stop (a callback that does
the same everywhere), they stop at once, as they would in one process.

(Lightning's own way is a broadcast between the GPUs and a blocking read before every batch.)
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ep.guards.agreement import Pending, SideGroup

log = logging.getLogger(__name__)

# What a rank may wish for. The sums say how many do.
STOP, TERMINATE, INTERRUPT, REQUEUE, VALIDATE = range(5)


class Control:
    """The agreement after every batch, for one trainer and its hosts.

    Attributes:
        agreed_end: SIGTERM or Ctrl-C ends the run on all ranks at the same batch.
        validated: set by the strategy when a validation ended.
    """

    def __init__(self, trainer: pl.Trainer, side: SideGroup) -> None:
        self.trainer, self.side = trainer, side
        self.agreed_end = self.validated = False
        self._wishes = {TERMINATE: False, INTERRUPT: False, REQUEUE: False}
        self._pending: Pending | None = None
        self._skips: Pending | None = None
        self._requeue: Callable[..., None] = lambda *_: None
        self._on_sigint_before: Any = None
        self._replaced: list[tuple[Any, str]] = []

    # -- putting it into Lightning's loops, and taking it out

    def attach(self) -> None:
        """Before Lightning registers its signal handlers. Where its private names have changed, its own way stays."""
        fit_loop, connector = self.trainer.fit_loop, self.trainer._signal_connector
        epoch_loop, module = fit_loop.epoch_loop, self.trainer.lightning_module
        self._requeue = getattr(connector, "_slurm_sigusr_handler_fn", self._requeue)
        self._replace(epoch_loop, "on_advance_end", partial(self._after_batch, epoch_loop.on_advance_end))
        self._replace(fit_loop, "on_advance_end", partial(self._after_epoch, fit_loop.on_advance_end))
        self._replace(epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
        self._replace(connector, "_sigterm_notifier_fn", self._on_sigterm)
        self._replace(connector, "_slurm_sigusr_handler_fn", self._on_requeue)
        if is_overridden("on_train_batch_start", module):
            self._replace(module, "on_train_batch_start", self._skipping_together(module.on_train_batch_start))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        if not hasattr(owner, name):
            log.debug("%s has no %s: Lightning's own way stays", type(owner).__name__, name)
            return
        owner.__dict__[name] = value
        self._replaced.append((owner, name))

    def detach(self) -> None:
        for owner, name in self._replaced:
            owner.__dict__.pop(name, None)
        self._replaced.clear()
        if self._on_sigint_before is not None:
            signal.signal(signal.SIGINT, self._on_sigint_before)
            self._on_sigint_before = None

    # -- signals arrive anywhere in the main thread: handlers take notes, the next agreement acts

    def _on_sigterm(self, signum: int, *_: Any) -> None:
        launcher = self.trainer.strategy.launcher
        if not self._wishes[TERMINATE] and launcher is not None:
            launcher.kill(signum)
        self._wishes[TERMINATE] = True

    def _on_requeue(self, *_: Any) -> None:
        self._wishes[REQUEUE] = True

    def _on_sigint(self, signum: int, frame: Any) -> None:
        if self._wishes[INTERRUPT] or self._on_sigint_before is None:
            signal.default_int_handler(signum, frame)
        self._wishes[INTERRUPT] = True
        print("\nStopping after this batch, on all ranks. Press Ctrl-C again to stop at once.", file=sys.stderr)

    def start(self) -> None:
        """The loop is about to begin on all ranks; hooks before it may have asked to stop."""
        self.trainer.should_stop = self.side.any(self.trainer.should_stop)
        self._take_sigint()

    def _take_sigint(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if self._on_sigint_before is None and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._on_sigint_before = signal.signal(signal.SIGINT, self._on_sigint)

    # -- agreements

    def _agree(self, stop: bool = False, validate: bool = False) -> tuple[list[int], Pending]:
        """How many ranks wished for what one batch ago, and this batch's sum, under way."""
        wishes = {**self._wishes, STOP: stop, VALIDATE: validate}
        now = self.side.start_sum([int(wishes[wish]) for wish in range(len(wishes))])
        previous, self._pending = self._pending, now
        agreed = previous.read() if previous is not None else [0] * len(wishes)
        if agreed[REQUEUE]:
            self._wishes[REQUEUE] = False
            self._pending = None  # it carries the wish that is granted here
            self._requeue(signal.SIGUSR1, None)
        if agreed[TERMINATE]:
            self.agreed_end = True
            self.trainer._signal_connector.received_sigterm = True  # the loops raise at their next good moment
        if agreed[INTERRUPT]:
            self.agreed_end = True
            raise KeyboardInterrupt
        return agreed, now

    def _after_batch(self, on_advance_end: Callable[[Any], None], data_fetcher: Any) -> None:
        trainer = self.trainer
        wants_stop, interval = trainer.should_stop, getattr(trainer, "_val_check_time_interval", None)
        due = interval is not None and time.monotonic() - trainer._last_val_time >= interval
        agreed, now = self._agree(stop=wants_stop, validate=due)
        trainer.should_stop = agreed[STOP] > 0 or (wants_stop and now.read()[STOP] == self.side.size)
        if interval is None:
            on_advance_end(data_fetcher)
        else:
            self._validate_together(agreed[VALIDATE] > 0, interval, on_advance_end, data_fetcher)
        if self.validated:  # what its hooks decided holds at once
            self.validated = False
            trainer.should_stop = self.side.any(trainer.should_stop)

    def _validate_together(
        self, is_time: bool, interval: float, on_advance_end: Callable[[Any], None], data_fetcher: Any
    ) -> None:
        """Lightning compares each rank's own clock with the interval; here all come to the same answer."""
        if is_time:
            self._pending = None  # ranks still wished for what happens now
        self.trainer._val_check_time_interval = 0.0 if is_time else float("inf")
        try:
            on_advance_end(data_fetcher)
        finally:
            self.trainer._val_check_time_interval = interval

    def _after_epoch(self, on_advance_end: Callable[[], None]) -> None:
        self._skips = None
        on_advance_end()
        self.trainer.should_stop = self.side.any(self.trainer.should_stop)

    def after_evaluation_batch(self) -> None:
        """In validation, test and prediction only signals matter."""
        self._take_sigint()
        self._agree()
        if self.agreed_end and self.trainer.predicting:
            raise SIGTERMException  # the other loops look for it themselves

    def _skipping_together(self, on_train_batch_start: Callable[..., Any]) -> Callable[..., Any]:
        """-1 skips the rest of the epoch when all ranks say so; one rank's comes into force with the next batch."""

        @wraps(on_train_batch_start)
        def together(*args: Any, **kwargs: Any) -> Any:
            answer = on_train_batch_start(*args, **kwargs)
            previous, self._skips = self._skips, self.side.start_sum([int(answer == -1)])
            if previous is not None and previous.read()[0] > 0:
                return -1
            if answer == -1 and self._skips.read()[0] < self.side.size:
                return None  # the others have begun this batch and need this rank's experts
            return answer

        return together
