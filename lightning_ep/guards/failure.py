"""What went wrong first, in words that all ranks can pass on."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch.distributed as dist
from torch import nn


class PeerError(RuntimeError):
    """Another rank failed, died or fell silent, so this one ends too. The message names rank and cause."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a job.

    Attributes:
        ranks: who failed, died or is missing; empty when it is nobody's fault.
        text: what happened to them, to follow "rank 1 ".
        seen_by: the rank that says so.
    """

    ranks: list[int] = field(default_factory=list)
    text: str = ""
    seen_by: int = 0

    def message(self, place: str) -> str:
        """The error of a rank that was at `place` and did nothing wrong."""
        who = f"{naming(self.ranks)} " if self.ranks else ""
        text = f"{who}{self.text}. This rank was {place}."
        if self.ranks and self.seen_by in self.ranks:
            text += f" The traceback of the cause is in the output of {naming(self.ranks[:1])}."
        return text

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Failure:
        return Failure(**json.loads(text))


def naming(ranks: list[int]) -> str:
    """ "rank 3", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(parts)}"


def described(error: BaseException, limit: int = 500) -> str:
    """One line for an exception."""
    first = " ".join(str(error).split())
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."


_COMMUNICATION = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|communicator|process group|timed out waiting", re.I
)


def is_communication_error(error: BaseException) -> bool:
    """Whether it says no more than that other ranks did not do their part."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    return isinstance(error, RuntimeError | ValueError) and bool(_COMMUNICATION.search(str(error)))


@contextmanager
def left_where_it_is(module: nn.Module | None) -> Generator[None, None, None]:
    """Lightning ends by moving the model to the CPU. After a set-up that failed before there were weights that would
    fail too, and hide why."""
    hollow = module is not None and any(t.is_meta for t in [*module.parameters(), *module.buffers()])
    if hollow:
        module.cpu = lambda: module  # type: ignore[method-assign]
    try:
        yield
    finally:
        if hollow:
            del module.cpu
