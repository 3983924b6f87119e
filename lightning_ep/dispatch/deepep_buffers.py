"""DeepEP's two buffer classes behind one small interface: `deep_ep.Buffer` (1.2) and `deep_ep.ElasticBuffer` (2.x).

Calls run on the current stream, which waits for DeepEP's own communication stream at the end of each (what a lane is
for), never with `async_finish`: that would call `record_stream` on every tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ep.flex import NVLINK_RANKS


@dataclass
class Arrived:
    """What `dispatch` brought: rows by source rank, their local expert ids (-1: another rank's) and weights, how many
    pairs each local expert has, and the handle for the way back."""

    rows_RD: Tensor
    local_RK: Tensor
    weights_RK: Tensor
    tokens_per_expert: list[int]
    handle: Any


class DeepEPBuffer(Protocol):
    """Moves bfloat16 rows; one for all layers of an EP group. Its methods are collective over the group."""

    def plan(self, experts_TK: Tensor, num_experts: int, hidden: int) -> Any:
        """Start what `dispatch` will need: it should not have to wait for it."""

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, plan: Any) -> Arrived:
        """Send every token once to each rank of its experts (int64), with its weights (float32). The host waits until
        it knows how many rows come."""

    def dispatch_again(self, x_TD: Tensor, handle: Any) -> Tensor:
        """`[R, D]`: other rows the same way."""

    def combine(self, rows_RD: Tensor, handle: Any, weights_RK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`[T, D]` and `[T, K]`: the way back; the rows (and weights) of one token are summed in float32."""

    def close(self) -> None:
        """Give the memory back."""


def open_buffer(deep_ep: ModuleType, group: ProcessGroup, num_sms: int) -> DeepEPBuffer:
    """The buffer class of the installed version."""
    if hasattr(deep_ep, "ElasticBuffer"):
        return ElasticBuffer(deep_ep, group, num_sms)
    return Buffer(deep_ep, group, num_sms)


class Buffer:
    """`deep_ep.Buffer`: chunks of tokens go through a buffer whose size depends on the hidden size alone."""

    def __init__(self, deep_ep: ModuleType, group: ProcessGroup, num_sms: int) -> None:
        self._class, self._group = deep_ep.Buffer, group
        self._class.set_num_sms(num_sms)
        self._hidden = 0
        self._buffer: Any = None

    def plan(self, experts_TK: Tensor, num_experts: int, hidden: int) -> Any:
        self._reserve(hidden)
        return self._buffer.get_dispatch_layout(experts_TK, num_experts)[:4]

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, plan: Any) -> Arrived:
        per_rank, per_rdma_rank, per_expert, is_token_in_rank = plan
        rows, local, weights, counts, handle, _ = self._buffer.dispatch(
            x_TD,
            topk_idx=experts_TK,
            topk_weights=weights_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=per_expert,
        )
        return Arrived(rows, local, weights, counts, handle)

    def dispatch_again(self, x_TD: Tensor, handle: Any) -> Tensor:
        return self._buffer.dispatch(x_TD, handle=handle)[0]

    def combine(self, rows_RD: Tensor, handle: Any, weights_RK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self._buffer.combine(rows_RD, handle, topk_weights=weights_RK)[:2]

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer, self._hidden = None, 0

    def _reserve(self, hidden: int) -> None:
        if hidden <= self._hidden:
            return
        self.close()  # every rank is at the same layer, so all grow together
        size, row_bytes = self._group.size(), hidden * torch.bfloat16.itemsize
        configs = self._class.get_dispatch_config(size), self._class.get_combine_config(size)
        rdma = [config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs] if size > NVLINK_RANKS else [0]
        self._buffer = self._class(
            self._group,
            num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs),
            num_rdma_bytes=max(rdma),
            # In a destructor the library may hang where an exception ends the process.
            explicitly_destroy=True,
        )
        self._hidden = hidden


class ElasticBuffer:
    """`deep_ep.ElasticBuffer`: its size, and every exchange, follow the largest number of tokens of a rank, on which the
    group agrees first."""

    def __init__(self, deep_ep: ModuleType, group: ProcessGroup, num_sms: int) -> None:
        self._class, self._group, self._num_sms = deep_ep.ElasticBuffer, group, num_sms
        self._reserved = (0, 0, 0)  # tokens, hidden, slots
        self._buffer: Any = None

    def plan(self, experts_TK: Tensor, num_experts: int, hidden: int) -> Any:
        return LargestOnItsWay(len(experts_TK), self._group, experts_TK.device), num_experts

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, plan: Any) -> Arrived:
        largest, num_experts = plan
        self._reserve(max(largest.read(), 1), x_TD.shape[1], experts_TK.shape[1])
        rows, local, weights, handle, _ = self._buffer.dispatch(
            x_TD,
            topk_idx=experts_TK,
            topk_weights=weights_TK,
            num_experts=num_experts,
            num_max_tokens_per_rank=self._reserved[0],
            num_sms=self._num_sms,
        )
        return Arrived(rows, local, weights, list(handle.num_recv_tokens_per_expert_list), handle)

    def dispatch_again(self, x_TD: Tensor, handle: Any) -> Tensor:
        return self._buffer.dispatch(x_TD, handle=handle, num_sms=self._num_sms)[0]

    def combine(self, rows_RD: Tensor, handle: Any, weights_RK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self._buffer.combine(rows_RD, handle, topk_weights=weights_RK)[:2]

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer, self._reserved = None, (0, 0, 0)

    def _reserve(self, tokens: int, hidden: int, slots: int) -> None:
        wanted = tuple(max(pair) for pair in zip(self._reserved, (tokens, hidden, slots), strict=True))
        if wanted == self._reserved:
            return
        self.close()
        tokens = 1 << (wanted[0] - 1).bit_length()  # in large steps: growing is slow
        self._reserved = (tokens, *wanted[1:])
        self._buffer = self._class(
            self._group,
            num_max_tokens_per_rank=tokens,
            hidden=wanted[1],
            num_topk=wanted[2],
            deterministic=True,  # rows in the order of their source, so that sums over them are the same every time
            explicitly_destroy=True,
        )


class LargestOnItsWay:
    """The largest value of any rank, on its way to the host while both passes go on launching."""

    def __init__(self, value: int, group: ProcessGroup, device: torch.device) -> None:
        self._largest = torch.full((1,), value, dtype=torch.int32, device=device)
        self._work = dist.all_reduce(self._largest, dist.ReduceOp.MAX, group=group, async_op=True)
        if device.type == "cuda":
            self._work.wait()
            self._on_host = torch.empty(1, dtype=torch.int32, pin_memory=True)
            self._on_host.copy_(self._largest, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> int:
        if self._largest.is_cuda:
            self._arrived.synchronize()
            return int(self._on_host)
        self._work.wait()
        return int(self._largest)
