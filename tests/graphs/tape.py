"""A recorder for the CPU: notes every operation and its tensors, and repeats them on the same memory, as a CUDA graph does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        self.replays = 0
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        # Recording a CUDA graph runs nothing: what others own is put back afterwards.
        for value, argument in zip([*args, *kwargs.values()], func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    where = tensor.untyped_storage().data_ptr()
                    if where not in self._made:
                        self._before.setdefault(where, (tensor.detach(), tensor.detach().clone()))
        out = func(*args, **kwargs)
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        if not aliases:
            self._made |= {t.untyped_storage().data_ptr() for t in tree_leaves(out) if isinstance(t, Tensor)}
        if not (aliases and not any(a.is_write for a in aliases)):  # not a view
            self.operations.append((func, args, kwargs, None if aliases else out))
        return out

    def restore(self) -> None:
        for tensor, value in self._before.values():
            tensor.copy_(value)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.operations:
            result = func(*args, **kwargs)
            if out is not None:
                for old, new in zip(tree_leaves(out), tree_leaves(result), strict=True):
                    if isinstance(old, Tensor):
                        old.detach().copy_(new)


class TapeRecorder:
    """Attributes:
    pools: how many were made.
    """

    def __init__(self) -> None:
        self.pools = 0
        self.tapes: list[Tape] = []

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def record(self, pool: int) -> Iterator[Tape]:
        tape = Tape()
        self.tapes.append(tape)
        with tape:
            yield tape
        tape.restore()
