"""A pool of gloo processes shared by all distributed tests: a test costs milliseconds, not a process start."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_LOST, _GO = "no answer", "go"
_IMPORT_SECONDS = 240
_GRACE_SECONDS = 20  # for the ranks' own time-outs, which say more


class RemoteError(AssertionError):
    """What a rank raised, with its traceback."""


class Pool:
    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, fn: Callable, world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                self._workers[rank][1].send((fn, args, rank, world_size, f"{folder}/store", timeout))
            # A new process first imports torch and whatever the test does; ranks that wait for it meet their timeout.
            answers = [self._receive(rank, _IMPORT_SECONDS, "does not start") for rank in range(world_size)]
            if all(ok for ok, _ in answers):
                for rank in range(world_size):
                    self._workers[rank][1].send(_GO)
                answers = [self._receive(rank, timeout + _GRACE_SECONDS, "hangs") for rank in range(world_size)]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            # Ranks that all answered are fit for the next test; starting new ones takes seconds.
            if any(text.startswith(_LOST) for ok, text in answers if not ok):
                self.close()
            raise RemoteError("\n".join(failures))
        return [value for _, value in answers]

    def _receive(self, rank: int, seconds: float, what: str) -> tuple[bool, Any]:
        process, pipe = self._workers[rank]
        try:
            return pipe.recv() if pipe.poll(seconds) else (False, f"{_LOST} after {seconds} s: {what}")
        except EOFError:
            process.join(5)
            return False, f"{_LOST}: died with exit code {process.exitcode}"

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers.clear()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            fn, args, rank, world_size, store, timeout = pipe.recv()
            pipe.send((True, "imported"))
            assert pipe.recv() == _GO
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
            GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="tests",
        )  # fmt: skip
        if handshake := sys.modules.get("lightning_ep.guards.handshake"):
            # Whoever edits the package while tests run makes workers of different ages.
            handshake.code_digest = lambda: "any"
        connected = False
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            dist.barrier()  # a rank that is done at once and leaves would meet another one still connecting
            connected = True
            answer = (True, fn(*args))
        except BaseException:
            # Without a group, torch's count of groups is no longer the other ranks'.
            answer = (False, ("" if connected else f"{_LOST}: not connected\n") + traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        try:
            pipe.send(answer)
        except Exception:  # not picklable
            pipe.send((False, traceback.format_exc()))


_pool = Pool()
atexit.register(_pool.close)


def run_distributed(fn: Callable, world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks with torch.distributed initialised; returns the ranks' values in order.

    `fn` is a module-level function, arguments and results picklable. The environment looks like torchrun's, so that a
    Trainer(devices=world_size) inside works. A failing or hanging rank raises RemoteError with all tracebacks.
    """
    return _pool.run(fn, world_size, *args, timeout=timeout)
