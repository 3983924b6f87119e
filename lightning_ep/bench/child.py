"""A training run in a process of its own: started, watched, and ended together with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_POLL = 0.2
_GRACE = 15.0  # seconds between asking a run to end and ending it
_TAIL = 4000


class RunFailed(Exception):
    """A run ended without a result; the message says how, with the last thing it wrote."""


def run_child(
    command: Sequence[str], log: Path, progress: Path, on_step: Callable[[int], None], timeout: float | None = None
) -> None:
    """Run `command` to its end.

    Args:
        command: program and arguments.
        log: gets everything that it prints.
        progress: a file in which it writes the number of steps done; need not exist.
        on_step: called with that number when it changes.
        timeout: seconds after which the run counts as failed; None waits.

    Raises:
        RunFailed: a non-zero exit, or the timeout. Whatever ends this function, no process of the run is left.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches only us, and its ranks can be ended with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _watch(process, progress, on_step, timeout)
        finally:
            _end(process)
    if process.returncode:
        raise RunFailed(f"exit code {process.returncode}: {_last_words(log)}")


def _watch(process: subprocess.Popen, progress: Path, on_step: Callable[[int], None], timeout: float | None) -> None:
    deadline, seen = None if timeout is None else time.monotonic() + timeout, 0
    while process.poll() is None:
        if (step := _read(progress)) != seen:
            on_step(seen := step)
        if deadline is not None and time.monotonic() > deadline:
            raise RunFailed(f"no end after {timeout:.0f} s, at step {seen}")
        time.sleep(_POLL)


def _read(progress: Path) -> int:
    try:
        return int(progress.read_text() or 0)
    except (OSError, ValueError):
        return 0


def _end(process: subprocess.Popen) -> None:
    """End the run and its ranks: politely first, so that they leave no shared memory behind."""
    for sign, grace in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        if not _alive(process.pid):
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        deadline = time.monotonic() + grace
        while _alive(process.pid) and time.monotonic() < deadline:
            process.poll()  # reap, or the group would seem alive
            time.sleep(0.05)
    process.wait()


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _last_words(log: Path) -> str:
    """The error in the log's tail: its last lines that say something."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("^")]
    return f"{' | '.join(lines[-3:])[-600:] or 'it printed nothing'} (all of it: {log})"
