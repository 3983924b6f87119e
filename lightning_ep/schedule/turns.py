"""Taking turns: the one mechanism behind every overlap schedule.

Two passes over the model run one at a time. A pass hands the turn over right after it launched communication
(and only at such fixed points), so the other pass computes while the tokens travel. Because the points are fixed
by the model, the order of all kernels on a rank and of all collectives across ranks is the same on every run.

The dispatchers call `hand_over(FORWARD)` or `hand_over(BACKWARD)`; outside a schedule that does nothing.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Protocol

FORWARD, BACKWARD = 0, 1

# Which half of a split batch the running code sees; 0 also for a whole one.
half: ContextVar[int] = ContextVar("half", default=0)


class TurnTaking(Protocol):
    """What a schedule does when a pass offers its turn."""

    def hand_over(self, me: int) -> None: ...


_active: TurnTaking | None = None


def hand_over(me: int) -> None:
    """Offer the turn to the other pass; returns when it is this pass's turn again."""
    if _active is not None:
        _active.hand_over(me)


def activate(schedule: TurnTaking | None) -> None:
    """Set the schedule that `hand_over` speaks to, or None."""
    global _active
    _active = schedule


def is_active() -> bool:
    return _active is not None


class PassAborted(RuntimeError):
    """Ends a pass whose partner failed; never reaches the user, who gets the partner's own exception."""


class TwoThreads:
    """A forward pass in the thread that makes this object and a backward pass in any other take turns, backward first.

    Only the thread that holds the turn runs, so the fields need no lock. A pass that ends, well or not, leaves;
    the other then keeps the turn, or is aborted at its next hand-over when its partner failed.
    """

    def __init__(self) -> None:
        self._gates = (threading.Lock(), threading.Lock())
        for gate in self._gates:
            gate.acquire()
        self._here = [True, True]
        self._forward_thread = threading.get_ident()
        self.error: BaseException | None = None

    def wait_for_first_turn(self, me: int) -> None:
        """The forward pass waits here until the backward has launched its first communication, or has left."""
        if me == FORWARD:
            self._gates[me].acquire()
            self._raise_if_partner_failed()

    def hand_over(self, me: int) -> None:
        # Activation checkpointing repeats a forward within the backward: that is the backward's turn.
        me = FORWARD if threading.get_ident() == self._forward_thread else BACKWARD
        other = 1 - me
        if self._here[other]:
            self._gates[other].release()
            self._gates[me].acquire()
        self._raise_if_partner_failed()

    def leave(self, me: int, error: BaseException | None = None) -> None:
        """This pass is done; its partner keeps the turn from now on."""
        self._here[me] = False
        if error is not None and self.error is None and not isinstance(error, PassAborted):
            self.error = error
        if self._here[1 - me]:
            self._gates[1 - me].release()

    def _raise_if_partner_failed(self) -> None:
        if self.error is not None:
            raise PassAborted("the other pass of this pair failed")
