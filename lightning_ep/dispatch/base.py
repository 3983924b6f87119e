"""One contract for every way of moving tokens to experts and back.

Legend of the shape suffixes in this folder:

    T  own tokens             K  experts a token chose (top-k)      D  hidden size of the experts' input
    W  ranks of the EP group  E  experts of the layer               L  experts on this rank (E / W)
    S  rows this rank sends   R  rows this rank received            P  (received row, local expert) pairs

An `Exchange` is the journey of one layer's tokens in one pass over the model. Each of its four legs is a launch,
which starts communication and returns at once, and a wait, which makes the compute stream wait:

    forward     launch_dispatch ... wait_dispatch  -> experts ->  launch_combine ... wait_combine
    backward    wait_dispatch_grad ... launch_dispatch_grad <- experts <- wait_combine_grad ... launch_combine_grad

What is computed between a launch and its wait overlaps. A dispatcher writes these eight methods with plain tensors (and
`prepare`, where something has to travel ahead of the tokens) and knows nothing of autograd; the four functions below make them differentiable and offer the turn to the other pass.

Launch and wait are two autograd nodes joined by an empty "ticket" tensor, since the exchanged gradient has another
number of rows than autograd would accept between them; the tensors themselves travel in the Exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from lightning_ep.dispatch.ranges import annotate
from lightning_ep.guards.progress import progress
from lightning_ep.schedule.turns import BACKWARD, FORWARD, hand_over

# Called with (leg, layer, launched_at, wait_began_at, wait_ended_at), in seconds of perf_counter, after each wait.
exchange_observers: list[Callable[[str, int, float, float, float], None]] = []

# Called with (layer, tokens of each local expert) in every forward, once the rows have arrived.
routing_observers: list[Callable[[int, list[int]], None]] = []


@dataclass(frozen=True)
class ExpertRows:
    """Tokens in front of their experts, sorted by local expert.

    `rows_PD`: one row a (token, local expert) pair. `weights_P`: its routing weight (float32, float64 for float64
    tokens). `offsets_L`: int32, where each local expert's rows end. `tokens_per_expert`: the same as host integers.
    """

    rows_PD: Tensor
    weights_P: Tensor
    offsets_L: Tensor
    tokens_per_expert: list[int]


class Exchange(ABC):
    """One layer's tokens on their way, in one pass. Created by `Dispatcher.route`."""

    layer: int
    after_dispatch_grad: Callable[[], None]
    leg: _Leg  # under way in the forward, and in the backward
    grad_leg: _Leg

    def prepare(self, x_TD: Tensor, weights_TK: Tensor) -> None:  # noqa: B027 - optional
        """Start what the launch needs, before the turn is offered: the other pass's kernels come in between."""

    @abstractmethod
    def launch_dispatch(self, x_TD: Tensor, weights_TK: Tensor) -> None:
        """Start sending tokens and weights to their experts."""

    @abstractmethod
    def wait_dispatch(self) -> ExpertRows:
        """The tokens that this rank's experts got."""

    @abstractmethod
    def launch_combine(self, out_PD: Tensor) -> None:
        """Start sending the experts' weighted outputs back; those of one token are summed first, in float32."""

    @abstractmethod
    def wait_combine(self) -> Tensor:
        """`[T, D]`: for each own token the sum over its experts."""

    @abstractmethod
    def launch_combine_grad(self, grad_TD: Tensor) -> None:
        """Start sending the output's gradient to the experts."""

    @abstractmethod
    def wait_combine_grad(self) -> Tensor:
        """`[P, D]`: the gradient of the experts' outputs."""

    @abstractmethod
    def launch_dispatch_grad(self, grad_PD: Tensor, grad_P: Tensor) -> None:
        """Start sending the gradients of the experts' rows and weights back."""

    @abstractmethod
    def wait_dispatch_grad(self) -> tuple[Tensor, Tensor]:
        """`[T, D]` and `[T, K]`: the gradients of the tokens and their weights."""


class Dispatcher(ABC):
    """How one layer's experts get their tokens.

    Attributes:
        moves: the functions of `permute.py`, or their Triton twins.
    """

    moves: ModuleType

    @abstractmethod
    def route(self, experts_TK: Tensor) -> Exchange:
        """Begin an exchange for these global expert ids (int64); starts whatever has to travel ahead."""


def dispatch(exchange: Exchange, x_TD: Tensor, weights_TK: Tensor) -> ExpertRows:
    """Send tokens to their experts; differentiable in tokens and weights.

    Offers the turn twice: before the host needs the sizes of the exchange, and once it is launched.
    """
    exchange.prepare(x_TD, weights_TK)
    hand_over(FORWARD)
    ticket = _LaunchDispatch.apply(exchange, x_TD, weights_TK)
    hand_over(FORWARD)
    arrived: list[ExpertRows] = []
    rows_PD, weights_P = _WaitDispatch.apply(exchange, ticket, arrived)
    for observe in routing_observers:
        observe(exchange.layer, arrived[0].tokens_per_expert)
    return ExpertRows(rows_PD, weights_P, arrived[0].offsets_L, arrived[0].tokens_per_expert)


def combine(exchange: Exchange, out_PD: Tensor) -> Tensor:
    """Bring the experts' outputs back to their tokens, `[T, D]`; differentiable."""
    ticket = _LaunchCombine.apply(exchange, out_PD)
    hand_over(FORWARD)
    return _WaitCombine.apply(exchange, ticket)


def hand_over_in_backward(x: Tensor) -> Tensor:
    """Identity whose backward offers the turn: the host reads the other pass's sizes while the GPU has work."""
    return _HandOverInBackward.apply(x)


class _Leg:
    """One leg under way: named for profilers, timed for the observers."""

    def __init__(self, name: str, exchange: Exchange, launch: Callable[..., None], *tensors: Tensor) -> None:
        self.name, self.layer = name, exchange.layer
        progress.enter((name, self.layer))  # a launch may wait for sizes
        with annotate(f"ep/{name}", self.layer):
            launch(*tensors)
        progress.leave()
        self.launched = perf_counter()

    def wait(self, wait: Callable[[], Any]) -> Any:
        began = perf_counter()
        progress.enter((self.name, self.layer))
        with annotate(f"ep/{self.name}", self.layer):
            arrived = wait()
        progress.leave()
        if exchange_observers:
            ended = perf_counter()
            for observe in exchange_observers:
                observe(self.name, self.layer, self.launched, began, ended)
        return arrived


def _ticket(like: Tensor) -> Tensor:
    return like.new_empty(0)


class _LaunchDispatch(Function):
    @staticmethod
    def forward(ctx, exchange: Exchange, x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.exchange, ctx.weights_dtype = exchange, weights_TK.dtype
        exchange.leg = _Leg("dispatch", exchange, exchange.launch_dispatch, x_TD, weights_TK)
        return _ticket(x_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx, _ticket_grad: Tensor):
        grad_TD, grad_TK = ctx.exchange.grad_leg.wait(ctx.exchange.wait_dispatch_grad)
        return None, grad_TD, grad_TK.to(ctx.weights_dtype)


class _WaitDispatch(Function):
    @staticmethod
    def forward(ctx, exchange: Exchange, ticket: Tensor, arrived: list[ExpertRows]) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        rows = exchange.leg.wait(exchange.wait_dispatch)
        arrived.append(rows)
        return rows.rows_PD, rows.weights_P

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PD: Tensor, grad_P: Tensor):
        exchange: Exchange = ctx.exchange
        exchange.grad_leg = _Leg("dispatch_bwd", exchange, exchange.launch_dispatch_grad, grad_PD, grad_P)
        exchange.after_dispatch_grad()
        hand_over(BACKWARD)
        return None, _ticket(grad_PD), None


class _LaunchCombine(Function):
    @staticmethod
    def forward(ctx, exchange: Exchange, out_PD: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.leg = _Leg("combine", exchange, exchange.launch_combine, out_PD)
        return _ticket(out_PD)

    @staticmethod
    @once_differentiable
    def backward(ctx, _ticket_grad: Tensor):
        return None, ctx.exchange.grad_leg.wait(ctx.exchange.wait_combine_grad)


class _WaitCombine(Function):
    @staticmethod
    def forward(ctx, exchange: Exchange, ticket: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.leg.wait(exchange.wait_combine)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor):
        exchange: Exchange = ctx.exchange
        exchange.grad_leg = _Leg("combine_bwd", exchange, exchange.launch_combine_grad, grad_TD.contiguous())
        hand_over(BACKWARD)
        return None, _ticket(grad_TD)


class _HandOverInBackward(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        hand_over(BACKWARD)
        return grad
