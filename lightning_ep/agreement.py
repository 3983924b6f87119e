"""What fails on one rank fails on all of them: the others would wait for it forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_all_ranks(action: Callable[[], T]) -> T:
    """Run `action` on every rank, collectively; when any rank's raises, every rank raises.

    A rank raises its own exception if it has one, otherwise a ValueError with the first rank's that failed. `action`
    must not communicate. Without a process group it is simply run.
    """
    if not dist.is_initialized():
        return action()
    result, failure = None, None
    try:
        result = action()
    except Exception as e:
        failure = e
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise ValueError(f"rank {rank} failed: {text}")
    return result  # type: ignore[return-value]
