"""Processes of the other ranks: who they are, and whether those on this machine still run."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A rank's process, as it describes itself.

    `machine` is equal for processes that see each other's /proc: same boot, same process namespace.
    """

    host: str
    machine: str
    pid: int
    started: str  # a process id is used again after a while; with its start time it is unique

    @staticmethod
    def own() -> Process:
        return Process(socket.gethostname(), _machine(), os.getpid(), _status(os.getpid())[1])

    def is_near(self) -> bool:
        """Whether this process can look at it."""
        return bool(self.machine) and self.machine == _machine()

    def state(self) -> str:
        """ "dead", "stopped", or "running" (also when it is out of sight)."""
        if not self.is_near():
            return "running"
        letter, started = _status(self.pid)
        if started != self.started or letter in "ZX":
            return "dead"
        return "stopped" if letter in "Tt" else "running"

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _machine() -> str:
    """Empty where there is no /proc, and so nothing to see."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, str]:
    """State letter and start time from /proc; ("X", "") for a process that is gone."""
    try:
        # The name in parentheses may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "X", ""
