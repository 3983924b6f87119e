"""Real processes for fault tests, in milliseconds: a nursery imports everything once and forks ranks that end as scripts do.

    with Job(fn, world_size, *args, folder=tmp_path) as job:
        ends = job.wait(limit=30)          # exit code, seconds, output of every rank; kills what is left at the limit

Each rank leads a session, so that whatever it leaves behind can be found. torch.distributed is not set up: the ranks
do that themselves, as under torchrun, with the environment's MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code (minus the signal that killed it, None: still there at the limit), when, and all
    that it printed. Seconds count from the fault that `strike` noted, or from the start."""

    code: int | None
    seconds: float
    output: str


class Nursery:
    """The process that forks ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.processes"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        _write(self._process.stdin, request)
        return _read(self._process.stdout)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _write(stream: BinaryIO, value: Any) -> None:
    pickle.dump(value, stream)
    stream.flush()


def _read(stream: BinaryIO) -> Any:
    return pickle.load(stream)


def _serve() -> Callable[[], Any] | None:
    """The nursery's loop; in a forked rank it returns what the rank has to do."""
    import lightning.pytorch  # noqa: F401
    import transformers  # noqa: F401

    import tests.faults.ranks  # noqa: F401

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in what they start in the background
    os.dup2(2, 1)  # whatever imports print must not get between the answers
    while True:
        try:
            kind, *rest = _read(requests)
        except EOFError:
            return None
        if kind == "fork":
            fn, args, environment, output = rest
            pid = os.fork()
            if pid == 0:
                os.setsid()
                stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(stream, 1)
                os.dup2(stream, 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.environ.update(environment)
                return lambda: fn(*args)
            _write(answers, pid)
        else:
            _write(answers, _ended(rest[0]))


def _ended(pids: list[int]) -> dict[int, int]:
    codes = {}
    for pid in pids:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


_nursery: Nursery | None = None


def _the_nursery() -> Nursery:
    global _nursery
    if _nursery is None:
        _nursery = Nursery()
        atexit.register(_nursery.close)
    return _nursery


class Job:
    """`fn(*args)` in `world_size` processes."""

    def __init__(self, fn: Callable, world_size: int, *args: Any, folder: Path) -> None:
        self.folder, self._nursery = folder, _the_nursery()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._outputs = [folder / f"rank{rank}.txt" for rank in range(world_size)]
        self.pids = [
            self._nursery.ask(
                "fork", fn, args,
                {
                    "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "faults",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FAULT_FOLDER": str(folder), "FAULT_WORLD": str(world_size),
                },
                str(self._outputs[rank]),
            )
            for rank in range(world_size)
        ]  # fmt: skip
        self._started = time.time()
        self._seen: set[int] = set()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        for pid in self._sessions():
            _kill_session(pid)

    def began(self) -> float:
        """When the fault happened; without one, when the ranks were started."""
        struck = self.folder / "struck"
        return float(struck.read_text()) if struck.exists() else self._started

    def wait(self, limit: float, stopped: tuple[int, ...] = ()) -> list[End]:
        """How all ranks ended, or were at the limit. Ranks in `stopped` are not waited for."""
        awaited = {pid: rank for rank, pid in enumerate(self.pids) if rank not in stopped}
        codes: dict[int, tuple[int | None, float]] = {}
        deadline = time.time() + limit
        while len(codes) < len(awaited) and time.time() < deadline:
            for pid, code in self._nursery.ask("ended", [pid for pid in awaited if pid not in codes]).items():
                codes[pid] = (code, time.time())
            self._seen.update(_pids_in(self._sessions()))
            time.sleep(0.05)
        began = self.began()
        ends = [codes.get(pid, (None, time.time())) for pid in self.pids]
        return [End(code, at - began, self.output(rank)) for rank, (code, at) in enumerate(ends)]

    def output(self, rank: int) -> str:
        return self._outputs[rank].read_text(errors="replace")

    def kill(self, rank: int) -> None:
        """Kill and reap."""
        os.kill(self.pids[rank], signal.SIGKILL)
        while not self._nursery.ask("ended", [self.pids[rank]]):
            time.sleep(0.02)

    def left_behind(self, patience: float = 8) -> list[str]:
        """What is left of the ranks and all that they started: command lines of processes, names of shared memory.

        (DataLoader workers look for their parent every few seconds.)
        """
        deadline = time.time() + patience
        while (left := _in_sessions(self._sessions())) and time.time() < deadline:
            time.sleep(0.1)
        return left or [f"/dev/shm/{name}" for name in _shared_memory(self._seen)]

    def _sessions(self) -> set[int]:
        return {*self.pids, *(int(path.name.removeprefix("session")) for path in self.folder.glob("session*[0-9]"))}


def _kill_session(leader: int) -> None:
    for pid in [leader, *_pids_in({leader})]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _pids_in(sessions: set[int]) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in sessions and fields[0] not in "ZX":
                found.append(int(path.name))
    return found


def _in_sessions(sessions: set[int]) -> list[str]:
    lines = []
    for pid in _pids_in(sessions):
        try:
            lines.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text()}")
        except OSError:
            continue
    return lines


def _shared_memory(pids: set[int]) -> list[str]:
    """What these processes left in shared memory: torch puts the owner's number into the name."""
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [name for name in names if (parts := name.split("_"))[0] == "torch" and parts[1] in map(str, pids)]


def note(name: str, text: str = "") -> None:
    """In a rank: leave a file for the test to find."""
    path = Path(os.environ["FAULT_FOLDER"], name)
    part = path.with_name(f"{name}.{os.getpid()}.part")
    part.write_text(text)
    part.rename(path)


def note_session() -> None:
    """In a rank: launchers give their ranks sessions of their own, in which leftovers have to be looked for, too."""
    note(f"session{os.getsid(0)}")


def strike() -> None:
    """In a rank: the fault happens now; times are counted from here."""
    note("struck", str(time.time()))


if __name__ == "__main__":
    work = _serve()
    if work is not None:
        work()
