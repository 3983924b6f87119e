"""The `flex` dispatcher over DeepEP: a token goes once to every rank of its experts, by kernels that write to the peers'
memory over NVLink and RDMA, on a few multiprocessors and on DeepEP's own stream.

    forward     dispatch (x, ids, weights) -> rows, local ids, weights, handle      combine (sums a rank's rows, handle)
    backward    combine (gradients of rows and weights, handle)                     dispatch (gradient, handle)

Moving rows to their experts' order and summing a row's outputs, in float32, are the functions of the alltoall
dispatcher. Inside `dispatch` the host waits until it knows how many rows come. So the sizes are on their way before the
turn is offered, and the dispatch waits for its own tokens only (`Lanes.ahead`), not for what the other pass launched
meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ep import libraries
from lightning_ep.dispatch.alltoall import choose_moves, refuse_ids
from lightning_ep.dispatch.base import Dispatcher, Exchange, ExpertRows
from lightning_ep.dispatch.deepep_buffers import open_buffer
from lightning_ep.dispatch.lanes import Lanes
from lightning_ep.flex import NVLINK_RANKS, unreachable

# The kernels copy half a row at a time in units of 16 bytes, through 8 KiB of shared memory.
_HIDDEN_MULTIPLE, _HIDDEN_LIMIT = 16, 8176


class DeepEPGroup:
    """DeepEP on one EP group: one buffer for all layers, made at the first exchange.

    Args:
        num_sms: multiprocessors that an exchange occupies; even.

    Raises:
        LibraryError: DeepEP is missing or cannot be used.
        ValueError: a group that DeepEP cannot connect.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, num_sms: int = 20) -> None:
        self.num_sms = num_sms
        self.size, self.rank, self.lanes = dist.get_world_size(group), dist.get_rank(group), Lanes(device)
        if problem := unreachable(self.size, int(os.environ.get("LOCAL_WORLD_SIZE", self.size))):
            raise ValueError(problem)
        deep_ep = libraries.load(libraries.DEEPEP)
        if self.size > NVLINK_RANKS and not hasattr(deep_ep, "ElasticBuffer"):
            libraries.require_ibgda()
        self.buffer = open_buffer(deep_ep, group, num_sms)

    def close(self) -> None:
        """Destroy the buffer. Collective: kernels of all ranks meet in it, so not after a failure."""
        self.buffer.close()


class DeepEPDispatcher(Dispatcher):
    """Exchanges one layer's tokens over DeepEP; arguments as `AllToAllDispatcher`."""

    def __init__(
        self,
        num_experts: int,
        group: DeepEPGroup,
        layer: int,
        fused: bool = False,
        after_dispatch_grad: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_experts, self.group, self.layer = num_experts, group, layer
        self.after_dispatch_grad = after_dispatch_grad
        self.moves = choose_moves(fused)
        self.num_exchanges = 0

    def route(self, experts_TK: Tensor) -> DeepEPExchange:
        self.num_exchanges += 1
        return DeepEPExchange(self, experts_TK)


class DeepEPExchange(Exchange):
    def __init__(self, dispatcher: DeepEPDispatcher, experts_TK: Tensor) -> None:
        self.dispatcher, self.number = dispatcher, dispatcher.num_exchanges
        self.layer, self.after_dispatch_grad = dispatcher.layer, dispatcher.after_dispatch_grad
        self.buffer, self.lanes = dispatcher.group.buffer, dispatcher.group.lanes
        self.experts_TK = experts_TK.to(torch.int64).contiguous()

    # -- dispatch: tokens to experts

    def prepare(self, x_TD: Tensor, weights_TK: Tensor) -> None:
        _refuse_tokens(x_TD)
        self.weights_TK = weights_TK.detach().to(torch.float32).contiguous()
        self._invalid = _InvalidOnTheirWay(self.experts_TK, self.dispatcher.num_experts)
        self._ready = self.lanes.mark()
        with self.lanes.ahead(self._ready):
            self._plan = self.buffer.plan(self.experts_TK, self.dispatcher.num_experts, x_TD.shape[1])

    def launch_dispatch(self, x_TD: Tensor, weights_TK: Tensor) -> None:
        self._sent = x_TD.detach()
        with self.lanes.ahead(self._ready) as self._under_way:
            try:
                self._arrived = self.buffer.dispatch(self._sent, self.experts_TK, self.weights_TK, self._plan)
            except RuntimeError as error:
                raise RuntimeError(self._describe(error)) from error
        if invalid := self._invalid.read():
            refuse_ids(self.layer, self.dispatcher.num_experts, {self.dispatcher.group.rank: invalid})

    def wait_dispatch(self) -> ExpertRows:
        self._under_way.wait()
        arrived, moves = self._arrived, self.dispatcher.moves
        num_rows, hidden = arrived.rows_RD.shape
        tokens_per_expert, self.num_pairs = arrived.tokens_per_expert, sum(arrived.tokens_per_expert)
        # Rows of all ranks as those of one: DeepEP does not say how many pairs each of them sent to each expert.
        counts_1C = _to_device([[num_rows, 0, *tokens_per_expert]], arrived.rows_RD.device)
        self.pos_RK, weights_P, offsets_L = moves.index_rows(
            arrived.local_RK, arrived.weights_RK, counts_1C, self.num_pairs, ep_rank=0
        )
        rows_PD = moves.scatter_rows(arrived.rows_RD, self.pos_RK, arrived.rows_RD.new_empty(self.num_pairs, hidden))
        self.lanes.all_read()
        self.handle = arrived.handle
        del self._arrived, self._under_way, self._sent, self._plan, self._invalid, self.experts_TK, self.weights_TK
        return ExpertRows(rows_PD, weights_P, offsets_L, tokens_per_expert)

    # -- combine: weighted outputs back to their tokens

    def launch_combine(self, out_PD: Tensor) -> None:
        self._rows = self._summed(out_PD.detach())
        with self.lanes.beside() as self._under_way:
            self._out, _ = self.buffer.combine(self._rows, self.handle)

    def wait_combine(self) -> Tensor:
        self._under_way.wait()
        out_TD = self._out
        del self._out, self._rows, self._under_way
        return out_TD

    # -- backward of combine

    def launch_combine_grad(self, grad_TD: Tensor) -> None:
        self._grads = grad_TD
        with self.lanes.beside() as self._grads_under_way:
            self._grad_rows = self.buffer.dispatch_again(grad_TD, self.handle)

    def wait_combine_grad(self) -> Tensor:
        self._grads_under_way.wait()
        rows_RD = self._grad_rows
        grad_PD = self.dispatcher.moves.scatter_rows(
            rows_RD, self.pos_RK, rows_RD.new_empty(self.num_pairs, rows_RD.shape[1])
        )
        del self._grads, self._grad_rows, self._grads_under_way
        return grad_PD

    # -- backward of dispatch

    def launch_dispatch_grad(self, grad_PD: Tensor, grad_P: Tensor) -> None:
        rows_RD = self._summed(grad_PD)
        weights_RK = torch.empty(self.pos_RK.shape, dtype=torch.float32, device=grad_P.device)
        self.dispatcher.moves.gather_slots(grad_P, self.pos_RK, weights_RK)
        self._grads = rows_RD, weights_RK
        with self.lanes.beside() as self._grads_under_way:
            self._grad_TD, self._grad_TK = self.buffer.combine(rows_RD, self.handle, weights_RK)

    def wait_dispatch_grad(self) -> tuple[Tensor, Tensor]:
        self._grads_under_way.wait()
        grad_TD, grad_TK = self._grad_TD, self._grad_TK
        del self._grad_TD, self._grad_TK, self._grads, self._grads_under_way, self.handle, self.pos_RK
        return grad_TD, grad_TK

    def _summed(self, rows_PD: Tensor) -> Tensor:
        """`[R, D]`: for each received row the sum over its local experts."""
        rows_RD = rows_PD.new_empty(self.pos_RK.shape[0], rows_PD.shape[1])
        return self.dispatcher.moves.gather_sum(rows_PD, self.pos_RK, rows_RD)

    def _describe(self, error: RuntimeError) -> str:
        group = self.dispatcher.group
        return (
            f"DeepEP's dispatch failed in MoE layer {self.layer}, its exchange number {self.number}, on EP rank "
            f"{group.rank} of {group.size}, which sends {len(self._sent)} tokens of {self._sent.shape[1]}: {error}. "
            "After a time-out look at the other ranks first: one of them failed, or took another path through the model"
        )


class _InvalidOnTheirWay:
    """How many expert ids lie outside [0, E); DeepEP drops them without a word. Known to the host once the dispatch,
    which was launched later, has returned."""

    def __init__(self, experts_TK: Tensor, num_experts: int) -> None:
        self._count = (experts_TK.clamp(0, num_experts - 1) != experts_TK).sum(dtype=torch.int32)
        self._arrived: torch.cuda.Event | None = None
        if experts_TK.is_cuda:
            on_host = torch.empty((), dtype=torch.int32, pin_memory=True)
            self._count = on_host.copy_(self._count, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> int:
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._count)


def _to_device(values: list[list[int]], device: torch.device) -> Tensor:
    """int32 tensor of host integers, without a wait."""
    if device.type == "cuda":
        return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)
    return torch.tensor(values, dtype=torch.int32, device=device)


def _refuse_tokens(x_TD: Tensor) -> None:
    if x_TD.dtype != torch.bfloat16:
        raise ValueError(
            f"moe_flex_dispatcher_backend='deepep' moves bfloat16 tokens, and these are {x_TD.dtype}; set the Trainer's "
            "precision='bf16-mixed' or 'bf16-true', or moe_token_dispatcher_type='alltoall'"
        )
    hidden = x_TD.shape[1]
    if hidden % _HIDDEN_MULTIPLE or hidden > _HIDDEN_LIMIT:
        raise ValueError(
            f"moe_flex_dispatcher_backend='deepep' moves tokens whose size is a multiple of {_HIDDEN_MULTIPLE} up to "
            f"{_HIDDEN_LIMIT}, and this model's hidden_size={hidden}; set moe_token_dispatcher_type='alltoall'"
        )
