"""The `alltoall` dispatcher: variable-split all-to-all over any torch.distributed backend.

A token is sent once per destination rank, not once per expert (top-8 of 128 experts over 8 ranks: 5.3 copies instead
of 8), with its weights along; where the experts are, their weighted outputs are summed before one row goes back.

    rank 0's send buffer   [ rows for rank 1 | rows for rank 2 | own rows ]
    rank 0's receive buffer                                   [ own rows | rows of rank 1 | rows of rank 2 ]

Both are views of one arena in which the own rows overlap, so what stays on the rank is never sent nor copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ep.dispatch import permute
from lightning_ep.dispatch.base import Dispatcher, Exchange, ExpertRows
from lightning_ep.dispatch.permute import INVALID, ROWS, TOKENS, Wire


class Transport(Protocol):
    """Carries rows between the ranks of an EP group.

    Attributes:
        num_sms: multiprocessors that an exchange occupies; 0 where that is not known.
    """

    size: int
    rank: int
    num_sms: int

    def all_to_all(
        self, out: Tensor, inp: Tensor, out_splits: list[int] | None = None, in_splits: list[int] | None = None
    ) -> Any:
        """Start sending `in_splits[r]` rows of `inp` to rank r (all alike without splits); the result has `wait()`,
        after which the current stream may read `out`."""

    def close(self) -> None:
        """Give back what was allocated for the exchanges; all ranks do so together, and not after a failure."""


class GroupTransport:
    """torch.distributed's all-to-all."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.num_sms = int(os.environ.get("NCCL_MAX_CTAS", 0))
        self._options = dist.AllToAllOptions()
        self._options.asyncOp = True  # on the group's own stream

    def all_to_all(
        self, out: Tensor, inp: Tensor, out_splits: list[int] | None = None, in_splits: list[int] | None = None
    ) -> dist.Work:
        # What dist.all_to_all_single calls in the end; its checks cost the host more than the launch itself.
        return self.group.alltoall_base(out, inp, out_splits or [], in_splits or [], self._options)

    def close(self) -> None:
        pass  # the group is the mesh's


class AllToAllDispatcher(Dispatcher):
    """Exchanges one layer's tokens over `transport`.

    Args:
        num_experts: experts of the layer over all ranks (E), divisible by the EP size.
        transport: what carries rows between the ranks of the EP group.
        layer: number of the MoE layer, for ranges and messages.
        dedup: send a token once per destination rank; off: once per expert, to compare.
        fused: Triton kernels for the moves in memory (CUDA only).
        after_dispatch_grad: called right after the gradient's way back was launched; computes delayed weight gradients.
    """

    def __init__(
        self,
        num_experts: int,
        transport: Transport,
        layer: int,
        dedup: bool = True,
        fused: bool = False,
        after_dispatch_grad: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_experts, self.transport, self.layer = num_experts, transport, layer
        self.dedup, self.after_dispatch_grad = dedup, after_dispatch_grad
        self.ep_size, self.ep_rank = transport.size, transport.rank
        self.moves = choose_moves(fused)

    def route(self, experts_TK: Tensor) -> AllToAllExchange:
        return AllToAllExchange(self, experts_TK)


def choose_moves(fused: bool) -> ModuleType:
    """The functions that move rows in memory: plain torch, or Triton kernels."""
    if not fused:
        return permute
    from lightning_ep.dispatch import kernels

    return kernels


class AllToAllExchange(Exchange):
    def __init__(self, dispatcher: AllToAllDispatcher, experts_TK: Tensor) -> None:
        self.dispatcher = dispatcher
        self.layer, self.after_dispatch_grad = dispatcher.layer, dispatcher.after_dispatch_grad
        self.token_shape = experts_TK.shape
        # Without dedup every (token, expert) pair is a token of its own that chose one expert.
        self.experts_TK = experts_TK if dispatcher.dedup else experts_TK.reshape(-1, 1)
        self.rank_TK, self.sent_WC = dispatcher.moves.plan_rows(
            self.experts_TK, dispatcher.num_experts, dispatcher.ep_size
        )
        self._counts = CountsOnTheirWay(dispatcher.transport, self.sent_WC)

    # -- dispatch: tokens to experts

    def launch_dispatch(self, x_TD: Tensor, weights_TK: Tensor) -> None:
        self._read_counts()
        self.wire = Wire(x_TD.shape[1], self.experts_TK.shape[1], x_TD.dtype)
        moves, d = self.dispatcher.moves, self.dispatcher
        self._arena = _Arena(self, self.wire.row_bytes, torch.uint8, x_TD.device)
        send = self._arena.send
        self.row_TK, first_TK = moves.resolve_rows(
            self.experts_TK, weights_TK.reshape(self.experts_TK.shape), self.rank_TK, self.sent_WC,
            d.ep_rank, d.num_experts, send, self.wire,
        )  # fmt: skip
        self.first_TK = first_TK.view(self.token_shape)
        moves.scatter_rows(x_TD.detach(), self.first_TK, self.wire.tokens(send))
        self._arena.launch_to_experts()
        del self.experts_TK, self.rank_TK, self.sent_WC

    def wait_dispatch(self) -> ExpertRows:
        received = self._arena.wait_at_experts()
        moves, wire = self.dispatcher.moves, self.wire
        self.pos_RK, weights_P, offsets_L = moves.index_rows(
            wire.experts(received), wire.weights(received), self.received_WC, self.num_pairs, self.dispatcher.ep_rank
        )
        rows_PD = received.new_empty(self.num_pairs * wire.hidden * wire.dtype.itemsize).view(wire.dtype)
        rows_PD = moves.scatter_rows(wire.tokens(received), self.pos_RK, rows_PD.view(self.num_pairs, wire.hidden))
        del self._arena, self.received_WC
        return ExpertRows(rows_PD, weights_P, offsets_L, self.tokens_per_expert)

    # -- combine: weighted outputs back to their tokens

    def launch_combine(self, out_PD: Tensor) -> None:
        self._arena = _Arena(self, out_PD.shape[1], out_PD.dtype, out_PD.device)
        self.dispatcher.moves.gather_sum(out_PD.detach(), self.pos_RK, self._arena.receive)
        self._arena.launch_to_tokens()

    def wait_combine(self) -> Tensor:
        sent = self._arena.wait_at_tokens()
        out_TD = sent.new_empty(self.token_shape[0], sent.shape[1])
        self.dispatcher.moves.gather_sum(sent, self.first_TK, out_TD)
        del self._arena
        return out_TD

    # -- backward of combine

    def launch_combine_grad(self, grad_TD: Tensor) -> None:
        self._grad_arena = _Arena(self, grad_TD.shape[1], grad_TD.dtype, grad_TD.device)
        self.dispatcher.moves.scatter_rows(grad_TD, self.first_TK, self._grad_arena.send)
        self._grad_arena.launch_to_experts()

    def wait_combine_grad(self) -> Tensor:
        received = self._grad_arena.wait_at_experts()
        grad_PD = received.new_empty(self.num_pairs, received.shape[1])
        self.dispatcher.moves.scatter_rows(received, self.pos_RK, grad_PD)
        del self._grad_arena
        return grad_PD

    # -- backward of dispatch

    def launch_dispatch_grad(self, grad_PD: Tensor, grad_P: Tensor) -> None:
        self._grad_arena = _Arena(self, self.wire.grad_row_bytes, torch.uint8, grad_PD.device)
        self.dispatcher.moves.gather_grads(grad_PD, grad_P, self.pos_RK, self._grad_arena.receive, self.wire)
        self._grad_arena.launch_to_tokens()

    def wait_dispatch_grad(self) -> tuple[Tensor, Tensor]:
        sent = self._grad_arena.wait_at_tokens()
        grad_TD, grad_TK = self.dispatcher.moves.read_grads(sent, self.first_TK, self.row_TK, self.wire)
        del self._grad_arena
        return grad_TD, grad_TK

    # -- sizes

    def _read_counts(self) -> None:
        """The one host read of an exchange: how many rows go where, and come from where."""
        sent, received, self.received_WC = self._counts.read()
        self.in_splits = [row[ROWS] for row in sent]
        self.out_splits = [row[ROWS] for row in received]
        me = self.dispatcher.ep_rank
        self.num_own = self.in_splits[me]
        self.in_splits[me] = self.out_splits[me] = 0
        self.tokens_per_expert = [sum(column) for column in zip(*(row[TOKENS:] for row in received), strict=True)]
        self.num_pairs = sum(self.tokens_per_expert)
        invalid = {rank: row[INVALID] for rank, row in enumerate(received) if row[INVALID]}
        del self._counts
        if invalid:
            refuse_ids(self.layer, self.dispatcher.num_experts, invalid)


def refuse_ids(layer: int, num_experts: int, invalid: dict[int, int]) -> NoReturn:
    """Say which EP ranks' routers yielded how many slots that name no expert."""
    raise RoutingError(
        f"MoE layer {layer}: expert ids outside [0, {num_experts}), or weights that are not finite, came from the router "
        f"of EP ranks {invalid} (rank: how many). A router that yields NaN or a top-k over the wrong axis does this."
    )


class RoutingError(RuntimeError):
    """A router named no expert. The message says in which layer and on which ranks."""


class CountsOnTheirWay:
    """Counts travel to the peers and on to the host while both passes go on launching.

    The copy to the host stands in the compute stream. That stream waits for the counts there, hence for what the EP
    group sent before them, but the next work that it gets needs that anyway.
    """

    def __init__(self, transport: Transport, sent_WC: Tensor) -> None:
        self.sent_WC = self.received_WC = sent_WC
        self.work = None
        if transport.size > 1:
            self.received_WC = torch.empty_like(sent_WC)
            self.work = transport.all_to_all(self.received_WC, sent_WC)
        if sent_WC.is_cuda:
            if self.work is not None:
                self.work.wait()
            self.on_host = torch.empty((2, *sent_WC.shape), dtype=torch.int32, pin_memory=True)
            self.on_host[0].copy_(sent_WC, non_blocking=True)
            self.on_host[1].copy_(self.received_WC, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> tuple[list[list[int]], list[list[int]], Tensor]:
        """Rows of counts sent and received on the host, and the received ones on the device."""
        if self.sent_WC.is_cuda:
            self.arrived.synchronize()
            sent, received = self.on_host.tolist()
            return sent, received, self.received_WC
        if self.work is not None:
            self.work.wait()
        return self.sent_WC.tolist(), self.received_WC.tolist(), self.received_WC


class _Arena:
    """One buffer for both ends of an exchange: `[to other ranks | own rows | from other ranks]`.

    `send` is its first part, own rows last; `receive` its last part, own rows first. Kept alive until waited for.
    """

    def __init__(self, exchange: AllToAllExchange, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.exchange = exchange
        num_sent, num_received = sum(exchange.in_splits), sum(exchange.out_splits)
        own = exchange.num_own
        rows = torch.empty(num_sent + own + num_received, columns, dtype=dtype, device=device)
        self.send, self.receive = rows[: num_sent + own], rows[num_sent:]
        self._sent, self._received = rows[:num_sent], rows[num_sent + own :]
        self._work = None

    def launch_to_experts(self) -> None:
        self._launch(self._received, self._sent, self.exchange.out_splits, self.exchange.in_splits)

    def launch_to_tokens(self) -> None:
        self._launch(self._sent, self._received, self.exchange.in_splits, self.exchange.out_splits)

    def wait_at_experts(self) -> Tensor:
        return self._wait(self.receive)

    def wait_at_tokens(self) -> Tensor:
        return self._wait(self.send)

    def _launch(self, out: Tensor, inp: Tensor, out_splits: list[int], in_splits: list[int]) -> None:
        if self.exchange.dispatcher.ep_size > 1:
            self._work = self.exchange.dispatcher.transport.all_to_all(out, inp, out_splits, in_splits)

    def _wait(self, rows: Tensor) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return rows
