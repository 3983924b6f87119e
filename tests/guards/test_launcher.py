"""Lightning's launcher kills what is left of a failed job, but not before its ranks had time to end by themselves."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lightning_ep.guards.launcher import let_ranks_end


@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_it_waits(patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[float] = []
    monkeypatch.setattr(_ChildProcessObserver, "_terminate_all", lambda self: killed.append(time.monotonic()))
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    observer = _ChildProcessObserver(0, [failed], sleep_period=0.05)
    observer.start()
    let_ranks_end(patience)
    let_ranks_end(100)  # once is enough
    failed.wait()
    began = time.monotonic()
    observer.join(20)
    assert not observer.is_alive() and len(killed) == 1
    assert killed[0] - began > patience - 0.1
