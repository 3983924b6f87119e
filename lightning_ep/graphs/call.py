"""The arguments of a layer's call: what may differ between two calls that one recording serves, and what may not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Call:
    """One call's arguments, tuples in them opened: `[hidden_states, mask, cos, sin, use_cache, ...]`.

    Attributes:
        leaves: the values in order.
        hidden: index of the layer's input, the first tensor of floating point.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self.leaves: list[Any] = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, tuple | list):
                self.leaves.extend(value)
            else:
                self.leaves.append(value)
        self.hidden = next(
            (i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), -1
        )

    def obstacle(self) -> str | None:
        """Why this call cannot be recorded, or None."""
        if self.hidden < 0:
            return "its call has no tensor of floating point"
        for _, tensor in self.other_tensors():
            if tensor.requires_grad:
                return f"a second argument, of shape {tuple(tensor.shape)}, needs a gradient"
        for leaf in self.leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                return f"its call has an argument of type {type(leaf).__name__} (a cache: set use_cache=False in the config)"
        return None

    def is_like(self, other: Call) -> bool:
        """Whether a recording of `other` serves this call."""
        return (
            len(self.leaves) == len(other.leaves)
            and self._kwargs.keys() == other._kwargs.keys()
            and all(_alike(a, b) for a, b in zip(self.leaves, other.leaves, strict=True))
            and not any(tensor.requires_grad for _, tensor in self.other_tensors())
        )

    def other_tensors(self) -> list[tuple[int, Tensor]]:
        """The tensors beside the hidden states, with their index among the leaves."""
        return [(i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and i != self.hidden]

    def forget_hidden(self) -> None:
        """Keep no more of the hidden states than their shape."""
        self.leaves[self.hidden] = torch.empty_like(self.leaves[self.hidden], device="meta")

    def replaced(self, leaves: Iterable[Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with other leaves."""
        rest = iter(leaves)

        def fill(value: Any) -> Any:
            return type(value)(next(rest) for _ in value) if isinstance(value, tuple | list) else next(rest)

        return tuple(fill(value) for value in self._args), {name: fill(value) for name, value in self._kwargs.items()}


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return type(a) is type(b) and a == b


class Static:
    """A tensor at a fixed address that recordings read; `load` brings it up to date."""

    def __init__(self, like: Tensor) -> None:
        self.tensor = torch.empty_like(like, requires_grad=False)
        self._loaded: tuple[Tensor, int] | None = None

    def load(self, source: Tensor) -> None:
        # All layers get the same mask and positions: the first one copies.
        if self._loaded is not None and source is self._loaded[0] and source._version == self._loaded[1]:
            return
        self.tensor.copy_(source)
        self._loaded = source, source._version
