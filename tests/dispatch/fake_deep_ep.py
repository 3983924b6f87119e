"""A model of the module `deep_ep` over any torch.distributed backend: DeepEP 1.2 (`Buffer`), 2.x (`ElasticBuffer` too)
and the branch hybrid-ep (`HybridEPBuffer`), so that what is written to their interfaces runs without a GPU.

Shapes, dtypes, orders, handles and what the real ones assert are as read in the public sources; memory that the real
ones leave uninitialised is filled with NaN.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Buffers that were not destroyed (HybridEP's: weak references, since theirs end with the object); the tests look here.
alive: list[Any] = []
# What was called on any buffer, in order.
calls: list[str] = []


@contextmanager
def installed(version: str) -> Iterator[ModuleType]:
    """`import deep_ep` gives the model of `version`: "1.2", "2.1" or "hybrid-ep"."""
    classes = {"1.2": (Buffer,), "2.1": (Buffer, ElasticBuffer), "hybrid-ep": (Buffer, HybridEPBuffer)}[version]
    module = ModuleType("deep_ep")
    module.__spec__ = ModuleSpec("deep_ep", None)
    for cls in classes:
        setattr(module, cls.__name__, cls)
    before = sys.modules.get("deep_ep")
    sys.modules["deep_ep"] = module
    alive.clear()
    calls.clear()
    try:
        yield module
    finally:
        del sys.modules["deep_ep"]
        if before is not None:
            sys.modules["deep_ep"] = before


class Config:
    def __init__(self, num_sms: int, send: int, receive: int) -> None:
        assert 0 < send < receive
        self.num_sms, self.receive = num_sms, receive

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        channels = self.num_sms // 2
        # Data, top-k of up to 128 and source of every token in flight.
        return channels * min(num_ranks, 8) * self.receive * (hidden_bytes + 128 * 12 + 4)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks > 8 and num_ranks % 8 == 0, "asked for RDMA within a node"
        return 2 * hidden_bytes * num_ranks


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.explicitly_destroy = explicitly_destroy
        assert len({*_gathered((num_nvl_bytes, num_rdma_bytes), group)}) == 1, "ranks ask for different sizes"
        alive.append(self)
        calls.append("Buffer")

    def destroy(self) -> None:
        assert self.explicitly_destroy and self in alive
        dist.barrier(self.group)
        alive.remove(self)
        calls.append("destroy")

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16, 24, 32, 48, 64), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 6, 256)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16, 24, 32, 48, 64), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 4, 256)

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, async_finish: bool = False) -> tuple:
        assert self in alive and topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        calls.append("layout")
        in_rank_TW = _in_rank(topk_idx, num_experts, self.size)
        valid = topk_idx[(topk_idx >= 0) & (topk_idx < num_experts)]
        per_expert = torch.bincount(valid, minlength=num_experts).int()
        return in_rank_TW.sum(0, dtype=torch.int32), None, per_expert, in_rank_TW, None

    def dispatch(
        self,
        x: Tensor,
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        config: Config | None = None,
        async_finish: bool = False,
    ) -> tuple:
        assert self in alive and x.is_contiguous() and x.dtype == torch.bfloat16
        assert x.shape[1] * x.element_size() % 16 == 0 and x.shape[1] % 16 == 0
        assert not async_finish, "calls record_stream"
        assert self.num_sms // 2 * self.size * 256 * x.shape[1] * 2 <= self.num_nvl_bytes, "buffer too small"
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            calls.append("dispatch again")
            return _send(x, handle[4], self.group), None, None, None, None, None
        calls.append("dispatch")
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        assert is_token_in_rank.shape == (len(x), self.size) and is_token_in_rank.dtype == torch.bool
        recv_x, idx, weights = _dispatch(x, topk_idx, topk_weights, is_token_in_rank, self.group, num_tokens_per_expert)
        counts = [int((idx == e).sum()) for e in range(len(num_tokens_per_expert) // self.size)]
        sent_WW = torch.stack(_gathered(num_tokens_per_rank, self.group))
        head_TW = torch.where(is_token_in_rank, is_token_in_rank.cumsum(0, dtype=torch.int32) - 1, -1)
        channels = torch.zeros(self.size, self.num_sms // 2, dtype=torch.int32)
        source = torch.zeros(len(recv_x), dtype=torch.int32)
        handle = (sent_WW.cumsum(0), channels, channels, source, is_token_in_rank, head_TW)
        return recv_x, idx, weights, counts, handle, None

    def combine(
        self, x: Tensor, handle: tuple, topk_weights: Tensor | None = None, async_finish: bool = False
    ) -> tuple[Tensor, Tensor | None, None]:
        prefix_WW, _, _, source, in_rank_TW, head_TW = handle
        assert self in alive and len(source) == len(x) == prefix_WW[-1, self.rank]
        assert head_TW.shape == in_rank_TW.shape and not async_finish
        calls.append("combine")
        return *_combine(x, in_rank_TW, topk_weights, self.group), None


class ElasticBuffer:
    def __init__(
        self,
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        deterministic: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        self.group, self.size = group, group.size()
        self.sizes = num_max_tokens_per_rank, hidden, num_topk
        self.explicitly_destroy = explicitly_destroy
        assert deterministic, "rows in any order"
        assert len({*_gathered(self.sizes, group)}) == 1, "ranks ask for different sizes"
        alive.append(self)
        calls.append("ElasticBuffer")

    destroy = Buffer.destroy

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        num_sms: int = 0,
        async_with_compute_stream: bool = False,
        handle: Any = None,
    ) -> tuple:
        assert self in alive and x.is_contiguous() and x.dtype == torch.bfloat16
        tokens, hidden, slots = self.sizes
        assert len(x) <= tokens and x.shape[1] <= hidden and not async_with_compute_stream
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            calls.append("dispatch again")
            return _send(x, handle.in_rank_TW, self.group), None, None, handle, None
        assert topk_idx.shape[1] <= slots and topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
        assert {*_gathered(num_max_tokens_per_rank, self.group)} == {tokens}, "ranks disagree on the largest"
        calls.append("dispatch")
        in_rank_TW = _in_rank(topk_idx, num_experts, self.size)
        recv_x, idx, weights = _dispatch(x, topk_idx, topk_weights, in_rank_TW, self.group, torch.empty(num_experts))
        counts = [int((idx == e).sum()) for e in range(num_experts // self.size)]
        handle = SimpleNamespace(in_rank_TW=in_rank_TW, num_recv_tokens_per_expert_list=counts)
        return recv_x, idx, weights, handle, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple:
        assert self in alive
        calls.append("combine")
        return *_combine(x, handle.in_rank_TW, topk_weights, self.group), None


class HybridEPBuffer:
    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
    ) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.capacity = hidden_dim, max_num_of_tokens_per_rank, num_local_experts
        if max_num_of_tokens_per_rank > 100_000:
            raise RuntimeError("The buffer config is not valid.")
        assert len({*_gathered(self.capacity, group)}) == 1, "ranks reallocate separately"
        assert hidden_dim % 16 == 0 and num_local_experts * self.size % 4 == 0
        alive.append(weakref.ref(self, alive.remove))
        calls.append("HybridEPBuffer")

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        num_of_experts_per_rank: int | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple | None = None,
        non_blocking: bool = False,
    ) -> tuple:
        calls.append("dispatch again" if handle else "dispatch")
        tokens, width = hidden.shape
        assert hidden.is_contiguous() and hidden.dtype == torch.bfloat16
        assert non_blocking and num_permuted_tokens >= 0 and num_permuted_tokens % (pad_multiple or 1) == 0
        assert {*_gathered(tokens, self.group)} == {tokens}, "ranks have different numbers of tokens"
        assert tokens % 64 * self.size * 4 % 16 == 0, "TMA 16B alignment error"
        if handle is None:
            assert width <= self.capacity[0] and tokens <= self.capacity[1], "would reallocate"
            assert num_of_experts_per_rank <= self.capacity[2] and routing_map.dtype == torch.bool
            assert routing_map.is_contiguous() and probs.is_contiguous() and probs.dtype == torch.float32
            num_local = num_of_experts_per_rank
            everyone_NE = torch.cat(_gathered(routing_map, self.group))
        else:
            num_local, everyone_NE = handle[9], handle[4]
            assert handle[8] == tokens, "another number of tokens than the handle's"
        mine_NL = everyone_NE[:, self.rank * num_local : (self.rank + 1) * num_local]
        place_NL, counts = _places(mine_NL, pad_multiple or 1)
        assert int(counts.sum()) <= num_permuted_tokens, "overflow: tokens would be dropped"
        rows_PD = torch.full((num_permuted_tokens, width), torch.nan, dtype=hidden.dtype)
        rows_PD[: int(counts.sum())] = 0  # padding
        tokens_ND = torch.cat(_gathered(hidden, self.group))
        source_N, expert_N = mine_NL.nonzero(as_tuple=True)
        rows_PD[place_NL[source_N, expert_N]] = tokens_ND[source_N]
        weights_P = None
        if probs is not None:
            weights_P = torch.full((num_permuted_tokens,), torch.nan)
            weights_P[: int(counts.sum())] = 0
            all_probs_NE = torch.cat(_gathered(probs, self.group))
            weights_P[place_NL[source_N, expert_N]] = all_probs_NE[source_N, self.rank * num_local + expert_N]
        empty = torch.empty(0)
        handle = (empty, empty, empty, empty, everyone_NE, empty, place_NL, empty, tokens, num_local, empty)
        return rows_PD, weights_P, None, counts, handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: tuple, pad_multiple: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        calls.append("combine")
        everyone_NE, place_NL, tokens, num_local = handle[4], handle[6], handle[8], handle[9]
        assert hidden.is_contiguous() and hidden.dtype == torch.bfloat16
        source_N, expert_N = (place_NL >= 0).nonzero(as_tuple=True)
        places_N = place_NL[source_N, expert_N]
        sums_ND = torch.zeros(len(everyone_NE), hidden.shape[1])
        sums_ND.index_add_(0, source_N, hidden[places_N].float())
        out_TD = sum(
            part.view(self.size, tokens, -1)[self.rank].float() for part in _gathered(sums_ND.bfloat16(), self.group)
        )
        out_TE = None
        if probs is not None:
            assert probs.dtype == torch.float32 and probs.is_contiguous()
            probs_NE = torch.zeros(everyone_NE.shape)
            probs_NE[source_N, self.rank * num_local + expert_N] = probs[places_N]
            out_TE = sum(part.view(self.size, tokens, -1)[self.rank] for part in _gathered(probs_NE, self.group))
        return out_TD.bfloat16(), out_TE


def _places(mine_NL: Tensor, pad_multiple: int) -> tuple[Tensor, Tensor]:
    """Where each (token, local expert) pair goes, -1 for none, and the padded number of rows of each expert."""
    counts_L = -(-mine_NL.sum(0) // pad_multiple) * pad_multiple
    starts_L = counts_L.cumsum(0) - counts_L
    return torch.where(mine_NL, starts_L + mine_NL.cumsum(0) - 1, -1), counts_L


def _in_rank(topk_idx: Tensor, num_experts: int, size: int) -> Tensor:
    """`[T, W]` bool; ids that do not exist go nowhere."""
    valid_TK = (topk_idx >= 0) & (topk_idx < num_experts)
    rank_TK = torch.where(valid_TK, topk_idx // (num_experts // size), size)
    return torch.zeros(len(topk_idx), size + 1, dtype=torch.bool).scatter_(1, rank_TK, True)[:, :size].contiguous()


def _dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, in_rank_TW: Tensor, group: dist.ProcessGroup, experts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
    assert topk_idx.is_contiguous() and topk_weights.is_contiguous() and topk_weights.shape == topk_idx.shape
    per_rank = len(experts) // group.size()
    idx = _send(topk_idx, in_rank_TW, group) - group.rank() * per_rank
    idx = torch.where((idx >= 0) & (idx < per_rank), idx, -1)
    weights = torch.where(idx >= 0, _send(topk_weights, in_rank_TW, group), 0)
    return _send(x, in_rank_TW, group), idx, weights


def _send(rows: Tensor, in_rank_TW: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows to the ranks that want them; they arrive by source rank, in its order."""
    return torch.cat([part[wanted[:, group.rank()]] for part, wanted in _gathered((rows, in_rank_TW), group)])


def _combine(
    x: Tensor, in_rank_TW: Tensor, topk_weights: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    assert x.dtype == torch.bfloat16 and x.is_contiguous()
    out_TD = _sum_back(x.float(), in_rank_TW, group).bfloat16()
    if topk_weights is None:
        return out_TD, None
    assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous() and len(topk_weights) == len(x)
    return out_TD, _sum_back(topk_weights, in_rank_TW, group)


def _sum_back(rows: Tensor, in_rank_TW: Tensor, group: dist.ProcessGroup) -> Tensor:
    me, total = group.rank(), torch.zeros(len(in_rank_TW), rows.shape[1])
    maps = _gathered(in_rank_TW, group)
    for rank, part in enumerate(_gathered(rows, group)):
        sizes = [int(wanted[:, rank].sum()) for wanted in maps]
        total[in_rank_TW[:, rank]] += part.split(sizes)[me]
    return total


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values
