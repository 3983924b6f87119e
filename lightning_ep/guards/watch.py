"""The watch: notices that a rank failed, died or fell silent, and ends this rank with a message that names it.

    rank 1 raised     ->  it says so on the board             ->  every other rank reads it within a second
    rank 1 was killed ->  ranks beside it see no process      ->  and say so on the board
    rank 1 is stopped ->  its neighbour misses its heartbeat  ->  likewise
    rank 1 is stuck   ->  a rank that waits for long asks where everybody is, and says who is behind

To end this rank, its NCCL communicators are aborted, which frees whoever waits for the GPU, and a signal raises
`PeerError` in the main thread. If that changes nothing, the process prints the message and exits.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_ep.guards.board import Board, hosted_by_launcher
from lightning_ep.guards.failure import Failure, PeerError, described, naming
from lightning_ep.guards.peers import Process
from lightning_ep.guards.progress import progress

log = logging.getLogger(__name__)

# Waiting for longer than this share of the time-out is noticed: the rest is for ending within it.
_PATIENCE = 0.8
# So many heartbeats may be late before a rank is taken for dead when a connection broke, too.
_MISSED_BEATS = 5
_NOBODY = "the connection to another rank broke or timed out, though every rank still answers: look at the network"
_SIGNAL = getattr(signal, "SIGRTMAX", None) or getattr(signal, "SIGUSR2", None)


class Watch:
    """Watches over one run (one call of fit, validate, test or predict) from a thread of its own.

    Args:
        processes: every rank's process, in order of rank.
        session: name of this run, the same on all ranks; keeps it apart from earlier ones of this process.
        timeout: how long ranks may wait for each other.
        where: says where this rank is; called from another thread.
        is_ending: whether an exception is being handled in the main thread already.

    Attributes:
        verdict: what ends this run, once it is known.
    """

    def __init__(
        self,
        processes: list[Process],
        rank: int,
        session: str,
        timeout: timedelta,
        where: Callable[[], str],
        is_ending: Callable[[], bool],
    ) -> None:
        self.processes, self.rank, self.where, self.is_ending = processes, rank, where, is_ending
        seconds = timeout.total_seconds()
        self.patience = seconds * _PATIENCE
        self.interval = min(1.0, max(0.05, seconds / 40))
        self.grace = max(5.0, seconds / 4)
        self.verdict: Failure | None = None
        self._start = progress.count
        self._near = [r for r, process in enumerate(processes) if r != rank and process.is_near()]
        self._failing = self._closed = False
        self._changed = threading.Event()
        self._board = Board(rank, len(processes), session, self.interval, self._beat)
        _arm(self)
        self._thread = threading.Thread(target=self._run, name="lightning_ep-watch", daemon=True)
        self._thread.start()

    # -- for the main thread

    def fail(self, error: BaseException) -> None:
        """This rank failed by itself: the others shall know."""
        self._failing = True
        self._board.post(Failure([self.rank], f"failed first: {described(error)} ({self.where()})", self.rank))
        abort_communication()

    def explain(self) -> Failure:
        """A collective failed on this rank: why? Waits a moment for the cause to arrive."""
        self._failing = True
        self._board.ask()
        deadline = time.monotonic() + (_MISSED_BEATS + 3) * self.interval + 1
        while self.verdict is None and time.monotonic() < deadline:
            self._changed.wait(self.interval)
        abort_communication()
        return self.verdict or self._positions() or Failure([], _NOBODY, self.rank)

    def message(self) -> str:
        assert self.verdict is not None
        return self.verdict.message(self.where())

    def close(self) -> None:
        """The run is over on this rank: nobody shall take its absence for a death."""
        self._closed = True
        _arm(None)
        self._board.close(done=not self._failing)

    # -- the thread

    def _run(self) -> None:
        count, since = progress.count, time.monotonic()
        while not self._closed and self.verdict is None:
            time.sleep(self.interval)
            self._look_at_peers(_MISSED_BEATS * self.interval if self._failing else self.patience)
            if progress.count != count:
                count, since = progress.count, time.monotonic()
            elif time.monotonic() - since > self.patience and self.verdict is None and not self._failing:
                self._look_at_positions()
        self._changed.set()
        if not self._closed:
            self._end()

    def _look_at_peers(self, patience: float) -> None:
        """Settle on what others reported, or on a rank that is gone or silent."""
        board = self._board
        gone = self._gone()
        if gone and board.reported is None:
            board.ask()
            time.sleep(2 * self.interval)  # the cause that it reported, or its farewell, may be on the way
            gone = self._gone()
        if board.reported is not None:
            self.verdict = board.reported
        elif gone:
            self._report(gone, f"died ({self._named(gone)})")
        elif silent := board.silent(patience):
            self._report(silent, f"did not answer for {patience:.0f} s ({self._named(silent)})")
        elif board.seconds_without_answer() > patience:
            host = f"that hosts the rendezvous store ({self._named([0])}) did not answer for {patience:.0f} s"
            launcher = Failure([], "torchrun's rendezvous store does not answer any more", self.rank)
            self.verdict = launcher if hosted_by_launcher() else Failure([0], host, self.rank)

    def _gone(self) -> list[int]:
        return [r for r in self._near if self.processes[r].state() == "dead" and not self._board.is_done(r)]

    def _look_at_positions(self) -> None:
        """This rank has not moved for long, and every rank is alive: is one of them behind?"""
        self._board.ask()
        time.sleep(3 * self.interval)
        if (failure := self._positions()) is not None:
            self._report(failure.ranks, failure.text)

    def _positions(self) -> Failure | None:
        """The ranks that are farthest behind this one or went another way, and where they are."""
        if done := [r for r, beat in self._board.beats.items() if beat["done"]]:
            return Failure(done, "had left the run already", self.rank)
        beats = {**self._board.beats, self.rank: self._beat()}
        least = min(beat["count"] for beat in beats.values())
        last = {r: beat for r, beat in sorted(beats.items()) if beat["count"] == least}
        where = {r: beat["where"] for r, beat in last.items()}
        if self.rank not in last:
            text = f"did not come within {self.patience:.0f} s: it was {next(iter(where.values()))}"
            return Failure(list(last), text, self.rank)
        # As far as this one: at the same place, unless some rank called what the others did not.
        places: dict[str, list[int]] = {}
        for r, beat in last.items():
            places.setdefault(beat["place"], []).append(r)
        if len(places) == 1:  # this rank waits for tokens under way, or others wait for it: they will say so
            return None
        most, *_, fewest = sorted(places.values(), key=lambda ranks: (-len(ranks), ranks))
        text = f"went another way: it was {where[fewest[0]]}, when {naming(most)} was {where[most[0]]}"
        return Failure(fewest, text, self.rank)

    def _report(self, ranks: list[int], text: str) -> None:
        self.verdict = Failure(ranks, text, self.rank)
        self._board.post(self.verdict)

    def _named(self, ranks: list[int]) -> str:
        states = [(self.processes[r], self.processes[r].state()) for r in ranks]
        return "; ".join(f"{p}, {state}" if state == "stopped" else str(p) for p, state in states)

    def _beat(self) -> dict[str, Any]:
        return {"count": progress.count - self._start, "place": progress.describe(), "where": self.where()}

    def _end(self) -> None:
        """Get the main thread out of whatever it waits in, or else end the process."""
        if not self._failing:
            abort_communication()
            if _SIGNAL is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
        deadline = time.monotonic() + self.grace
        while time.monotonic() < deadline:
            if self._closed:
                return
            time.sleep(self.interval)
        print(f"[rank {self.rank}] {PeerError.__name__}: {self.message()}", file=sys.stderr, flush=True)
        os._exit(1)


# The watch whose run the main thread is in.
_armed: Watch | None = None


def _arm(watch: Watch | None) -> None:
    global _armed
    _armed = watch
    if watch is not None and _SIGNAL is not None and threading.current_thread() is threading.main_thread():
        signal.signal(_SIGNAL, _raise_peer_error)


def _raise_peer_error(*_: Any) -> None:
    watch = _armed
    if watch is not None and watch.verdict is not None and not watch._failing and not watch.is_ending():
        raise PeerError(watch.message())


def abort_communication() -> None:
    """Free this process from collectives that will not end: kernels of NCCL wait for a dead peer forever.

    gloo needs nothing: its operations end when the peer's process does, or at their time-out.
    """
    abort = getattr(distributed_c10d, "_abort_process_group", None)
    with _aborting:
        if abort is not None and dist.is_initialized() and dist.get_backend() == "nccl":
            abort()


_aborting = threading.Lock()
