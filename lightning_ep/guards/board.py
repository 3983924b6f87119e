"""The board: a thread that exchanges heartbeats and the first failure with the other ranks through a store.

Only this thread talks to the store, with a client of its own: the store's host may be the rank that does not answer,
and then the thread hangs, which the others of this process can see from `seconds_without_answer`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_ep.guards.failure import Failure

log = logging.getLogger(__name__)


class Board:
    """Heartbeats of this rank and of those it looks at, and the failure that was reported first.

    Args:
        session: name of the run, the same on all ranks; keeps runs in one process apart.
        interval: seconds between two heartbeats.
        beat: what a heartbeat says, JSON values.

    Attributes:
        reported: the first failure that any rank reported.
        beats: the last heartbeats seen; only the next rank's until `ask()`.
    """

    def __init__(self, rank: int, size: int, session: str, interval: float, beat: Callable[[], dict[str, Any]]) -> None:
        self.rank, self.size, self.interval, self.beat = rank, size, interval, beat
        self.reported: Failure | None = None
        self.beats: dict[int, dict[str, Any]] = {}
        self._changed: dict[int, float] = {}
        # Every rank watches its neighbour, so that a dead one is always seen by a living one.
        self._watched = [(rank + 1) % size]
        self._post: Failure | None = None
        self._closing = self._done = False
        self._wake, self._numbers = threading.Event(), 0
        self._answered = time.monotonic()
        self._store = _own_client(session)
        self._broken = self._store is None
        self._thread = threading.Thread(target=self._run, name="lightning_ep-board", daemon=True)
        if not self._broken:
            self._say()
            self._thread.start()

    # -- for other threads, never blocking for long

    def ask(self) -> None:
        """From now on look at every rank, not only at the next one."""
        self._watched = [rank for rank in range(self.size) if rank != self.rank]
        self._wake.set()

    def post(self, failure: Failure) -> None:
        """Report a failure, unless another one was reported before."""
        self._post = failure
        self._wake.set()

    def close(self, done: bool) -> None:
        """Send what is to be sent and stop; `done` tells the others that this rank left in good order."""
        self._closing, self._done = True, done
        self._wake.set()
        if self._thread.is_alive():
            # A thread that waits for a silent store would hold up the end.
            self._thread.join(2 if self.seconds_without_answer() <= 3 * self.interval else 0)

    def is_done(self, rank: int) -> bool:
        return bool(self.beats.get(rank, {}).get("done"))

    def silent(self, patience: float) -> list[int]:
        """The ranks, of those looked at, whose heart has not beaten for `patience` seconds."""
        if self.seconds_without_answer() > 3 * self.interval:
            return []  # then it is the store that does not answer
        now = time.monotonic()
        return [
            rank for rank, since in list(self._changed.items()) if now - since > patience and not self.is_done(rank)
        ]

    def seconds_without_answer(self) -> float:
        """How long the store has been silent."""
        if self._broken:
            return 0 if self._store is None else float("inf")
        return time.monotonic() - self._answered

    # -- the thread

    def _run(self) -> None:
        try:
            while True:
                self._exchange()
                if self._closing and self._post is None:
                    return
                self._wake.wait(self.interval)
                self._wake.clear()
        except (dist.DistError, RuntimeError) as error:
            log.debug("the store does not answer: %s", error)
            self._broken = True

    def _exchange(self) -> None:
        assert self._store is not None
        self._say()
        if (post := self._post) is not None:
            self._store.compare_set("failed", "", post.encode())
            self._post = None
        if self.reported is None and self._store.check(["failed"]):
            self.reported = Failure.decode(self._store.get("failed"))
        watched = self._watched
        for rank, text in zip(watched, self._store.multi_get([f"beat/{rank}" for rank in watched]), strict=True):
            beat = json.loads(text)
            if self.beats.get(rank) != beat:
                self._changed[rank] = time.monotonic()
                self.beats[rank] = beat
        self._answered = time.monotonic()

    def _say(self) -> None:
        assert self._store is not None
        self._numbers += 1
        beat = {**self.beat(), "number": self._numbers, "done": self._closing and self._done}
        self._store.set(f"beat/{self.rank}", json.dumps(beat))


def hosted_by_launcher() -> bool:
    """Whether the store lives in torchrun's agent; rank 0 hosts it otherwise."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_client(session: str) -> dist.Store | None:
    """A client of the rendezvous store for this thread alone, or None where there is none to be had."""
    try:
        store = distributed_c10d._get_default_store()
        if hasattr(store, "clone"):
            store = store.clone()
        store = dist.PrefixStore(f"lightning_ep/{session}", store)
        store.set_timeout(timedelta(seconds=10))
        return store
    except (AttributeError, RuntimeError, ValueError, NotImplementedError) as error:
        log.debug("no heartbeats: %s", error)
        return None
