"""The queue of delayed weight gradients.

A backward that delays its weight gradient returns the input gradient at once and leaves a closure here. The schedule
empties the queue where the GPU would otherwise wait for communication, and in any case before gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_ep.dispatch.ranges import annotate


class WeightGradQueue:
    """First in, first out. A closure computes one gradient, which is added to what the parameter has."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, int, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, parameter: nn.Parameter, layer: int, compute: Callable[[], Tensor]) -> None:
        """Queue `compute() -> gradient of parameter`, same shape, any floating dtype."""
        self._waiting.append((parameter, layer, compute))

    @torch.no_grad()
    def flush(self) -> None:
        """Compute and add every queued gradient, then run the parameters' post-accumulate hooks as autograd would."""
        while self._waiting:
            parameter, layer, compute = self._waiting.pop(0)
            with annotate("ep/wgrad", layer):
                accumulate(parameter, compute())
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(parameter)

    def drop(self) -> None:
        """Forget everything queued: the backward it belongs to failed."""
        self._waiting.clear()


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add to `parameter.grad`, as AccumulateGrad does: never assigned over what is there."""
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)
