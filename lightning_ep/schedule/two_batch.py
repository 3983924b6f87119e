"""two_batch: two halves of one batch take turns inside one forward of the decoder stack.

The halves run as two greenlets of one thread. Autograd numbers nodes as they are made, so its backward goes through
them in the reverse order, the halves taking turns there too, with nothing of ours in charge:

    comm      dispatch A | dispatch B             | combine A             | combine B
    compute   attention B | experts A             | experts B             | attention A

Losses and logged values are those of the undivided batch, since the stack's outputs are joined before anything else
sees them; a sum over tokens may round differently. What a layer leaves on itself instead (an attribute, a BatchNorm's
statistics) is one half's; `MoELayer.aux_loss` knows of both.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_ep.experts.interface import FoundExperts
from lightning_ep.schedule.turns import FORWARD, activate, half


def find_stack(model: nn.Module, experts: list[FoundExperts], name: str | None = None) -> tuple[str, nn.Module]:
    """The module whose forward is split: the owner of the list of layers that holds all experts, or the one named.

    Raises ValueError when the name is unknown, or when there is no such list or more than one.
    """
    modules = dict(model.named_modules())
    if name is not None:
        if name not in modules:
            near = [n for n in modules if n and name.rpartition(".")[2] == n.rpartition(".")[2]]
            raise ValueError(
                f"overlap_split_module={name!r} is no module of the model; did you mean one of {near[:5]}?"
            )
        return name, modules[name]
    inside = {found.module for found in experts}
    stacks = [n for n, m in modules.items() if isinstance(m, nn.ModuleList) and inside <= set(m.modules())]
    if not stacks:
        raise ValueError(
            "overlap_schedule='two_batch' and cuda_graph_scope found no list of layers that holds all experts; name the module whose forward "
            "takes the batch and runs the layers: overlap_split_module='model.decoder'"
        )
    owner = stacks[-1].rpartition(".")[0]  # the innermost one
    return owner, modules[owner]


class TwoBatch:
    """Splits the forward of one module while installed."""

    def __init__(self, stack: nn.Module, on_batch_of_one: Callable[[], None]) -> None:
        self.stack, self._on_batch_of_one = stack, on_batch_of_one
        self._whole = stack.forward
        stack.forward = MethodType(_split_forward, stack)
        object.__setattr__(stack, "_two_batch", self)

    def close(self) -> None:
        """Give the module its own forward back."""
        self.stack.forward = self._whole
        object.__delattr__(self.stack, "_two_batch")

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        batch = _batch_size(args, kwargs)
        if not torch.is_grad_enabled() or batch is None:
            return self._whole(*args, **kwargs)
        if batch < 2:
            self._on_batch_of_one()
            return self._whole(*args, **kwargs)
        first = -(-batch // 2)
        halves = [_cut((args, kwargs), batch, rows) for rows in (slice(0, first), slice(first, batch))]
        return _join(_in_turns([lambda part=part: self._whole(*part[0], **part[1]) for part in halves]))


def _split_forward(stack: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return stack._two_batch.run(args, kwargs)


class _Halves:
    """Two greenlets; whichever hands over wakes the other."""

    def __init__(self) -> None:
        self.runners: list[greenlet] = []

    def hand_over(self, me: int) -> None:
        current = getcurrent()
        other = next((g for g in self.runners if g is not current), None)
        if me == FORWARD and current in self.runners and other is not None and not other.dead:
            other.switch()


def _in_turns(halves: list[Callable[[], Any]]) -> list[Any]:
    """Run both; each hand-over of one switches to the other. An exception of one ends both."""
    schedule = _Halves()
    results: list[Any] = [None] * len(halves)

    def runner(index: int) -> None:
        results[index] = halves[index]()

    for index in range(len(halves)):
        run = greenlet(lambda index=index: runner(index))
        run.gr_context = contextvars.copy_context()  # each half has its own collectors of router logits and the like
        run.gr_context.run(half.set, index)
        schedule.runners.append(run)
    activate(schedule)
    try:
        for run in schedule.runners:
            while not run.dead:
                run.switch()
    finally:
        activate(None)
        for run in schedule.runners:
            if not run.dead:
                run.throw(GreenletExit)
    return results


def _batch_size(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Rows of the first tensor with at least two dimensions: token ids or embeddings."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.dim() >= 2]
    return tensors[0].shape[0] if tensors else None


def _cut(arguments: tuple[tuple, dict[str, Any]], batch: int, rows: slice) -> tuple[tuple, dict[str, Any]]:
    """Tensors of the batch are cut; what has another leading size (positions `[1, S]`) or one dimension is shared."""
    return tree_map(
        lambda x: x[rows] if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[0] == batch else x, arguments
    )


def _join(outputs: list[Any]) -> Any:
    """Halves of every output tensor in one; other values must agree or are left out (caches)."""
    flat = [tree_flatten(output) for output in outputs]
    if flat[0][1] != flat[1][1]:
        raise ValueError("overlap_schedule='two_batch': the two halves returned different structures; use '1f1b'")
    joined = []
    for one, other in zip(flat[0][0], flat[1][0], strict=True):
        if isinstance(one, Tensor) and one.dim() == 0:
            raise ValueError(
                "overlap_schedule='two_batch': the split module returns a scalar, which halves cannot be joined to; name a "
                "module further inside by overlap_split_module"
            )
        if isinstance(one, Tensor):
            joined.append(torch.cat([one, other]))
        else:
            joined.append(one if one is other or one == other else None)
    return tree_unflatten(joined, flat[0][1])
