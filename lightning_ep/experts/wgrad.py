"""Weight gradients outside of autograd: delayed, accumulated in place, or both.

A backward whose weight gradient is taken over returns its input gradient at once and pushes the rest here. A delayed
gradient waits until the queue is emptied: where the GPU would otherwise wait for communication, and at the latest when
the backward ends. A fused one is accumulated into the gradient by the GEMM itself, with no temporary.

What autograd does for a parameter is then done here: contributions of one backward are summed, the sum is added to
`.grad`, and post-accumulate hooks (DDP's, FSDP's, a user's) run once a backward, when the gradient is there. Autograd
itself must not see the parameter, or it would run those hooks too early. In its place stands the parameter's ticket, an
empty leaf of which autograd tells when the backward has passed the last use: tied weights have several.

Nothing here knows of experts: any parameter may be queued.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_ep.dispatch.ranges import annotate

# Before torch 2.10 a half-precision parameter cannot have a float32 gradient.
_FLOAT32_GRADIENTS = hasattr(torch.Tensor, "grad_dtype")
_HALF = (torch.bfloat16, torch.float16)


class WeightGrad(Protocol):
    """One contribution to a parameter's gradient, not computed yet."""

    def compute(self) -> Tensor:
        """The contribution, in any floating dtype."""

    def add_to(self, buffer: Tensor) -> None:
        """Add it to `buffer`, of `gradient_dtype`, in place."""


@dataclass
class _Entry:
    parameter: nn.Parameter
    layer: int
    grad: WeightGrad
    last: bool = False  # of its parameter in this backward


class WeightGradQueue:
    """First in, first out; each weight gradient is computed exactly once.

    Holds what one layer's weight gradients need, at most: pushing another layer's computes the ones before.

    Attributes:
        delay: whether weight gradients wait for `flush`; off: a pushed one is computed at once.
        fuse: whether they are accumulated into `.grad` directly, in `gradient_dtype`, instead of computed and added.
    """

    def __init__(self, fuse: bool = False) -> None:
        self.delay = False
        self.fuse = fuse
        self._waiting: deque[_Entry] = deque()
        # Parameters that this backward has contributed to and will again; the sum so far, where it is held apart.
        self._open: dict[nn.Parameter, Tensor | None] = {}
        self._tickets: dict[nn.Parameter, Tensor] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._open)

    def takes(self, parameter: Tensor) -> bool:
        """Whether this parameter's gradient is computed here, in the graph that is being built.

        A gradient hook on the parameter may change the gradient before it is added: then autograd keeps it.
        """
        wanted = (self.delay or self.fuse) and torch.is_grad_enabled()
        return wanted and parameter.is_leaf and parameter.requires_grad and not parameter._backward_hooks

    def ticket(self, parameter: nn.Parameter) -> Tensor:
        """What stands for a taken parameter in the autograd graph; its gradient is any tensor of its (empty) shape."""
        ticket = self._tickets.get(parameter)
        if ticket is None or ticket.device != parameter.device:
            ticket = self._tickets[parameter] = torch.empty(0, device=parameter.device, requires_grad=True)
            ticket.register_post_accumulate_grad_hook(partial(self._passed, parameter))
        return ticket

    def push(self, parameter: nn.Parameter, layer: int, grad: WeightGrad) -> None:
        """Take over one contribution to the gradient of `parameter`."""
        if self._waiting and self._waiting[0].layer != layer:
            self.flush()
        self._waiting.append(_Entry(parameter, layer, grad))
        if not self.delay:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Compute everything that waits."""
        while self._waiting:
            entry = self._waiting.popleft()
            parameter = entry.parameter
            with annotate("ep/wgrad", entry.layer):
                if self.fuse:
                    entry.grad.add_to(gradient_buffer(parameter))
                    self._open[parameter] = None
                else:
                    grad = entry.grad.compute().to(parameter.dtype)
                    held = self._open.get(parameter)
                    # Summed before it is added to earlier micro-batches' gradient, as autograd does: the same bits.
                    self._open[parameter] = grad if held is None else held.add_(grad)
            if entry.last:
                self._close(parameter)

    def drop(self) -> None:
        """Forget everything: the backward that it belongs to failed."""
        self._waiting.clear()
        self._open.clear()

    def assert_empty(self) -> None:
        """Nothing may be left when gradients are read. A programming error, hence an AssertionError."""
        layers = sorted({entry.layer for entry in self._waiting})
        shapes = [tuple(parameter.shape) for parameter in self._open]
        assert not len(self), (
            f"{len(self)} weight gradients are not in .grad yet (waiting: layers {layers}, incomplete: {shapes}); "
            "was a backward run without the strategy? Use self.manual_backward(loss), not loss.backward()"
        )

    def _passed(self, parameter: nn.Parameter, ticket: Tensor) -> None:
        """The running backward has passed the parameter's last use."""
        ticket.grad = None
        for entry in reversed(self._waiting):
            if entry.parameter is parameter:
                entry.last = True
                return
        if parameter in self._open:
            with torch.no_grad():
                self._close(parameter)

    def _close(self, parameter: nn.Parameter) -> None:
        grad = self._open.pop(parameter)
        if grad is not None:
            accumulate(parameter, grad)
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add to `parameter.grad`, as AccumulateGrad does: never assigned over what is there."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a fused gradient: float32 for half-precision parameters, as Megatron's main_grad."""
    return torch.float32 if parameter.dtype in _HALF and _FLOAT32_GRADIENTS else parameter.dtype


def gradient_buffer(parameter: nn.Parameter) -> Tensor:
    """`parameter.grad` in `gradient_dtype`, zeros where there was none: what fused gradients are accumulated into.

    The gradient reduction rounds it to the parameter's dtype, so that optimizers see what they are used to.
    """
    dtype = gradient_dtype(parameter)
    if parameter.grad is None or parameter.grad.dtype != dtype:
        if dtype != parameter.dtype:
            parameter.grad_dtype = None  # any
        old = parameter.grad
        parameter.grad = torch.zeros_like(parameter, dtype=dtype) if old is None else old.to(dtype)
    return parameter.grad
