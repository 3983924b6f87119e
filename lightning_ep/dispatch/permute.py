"""Moving rows in memory: plain tensor functions, with Triton twins (`kernels.py`) of the same names and results.

A position table `pos_NJ` (int32) says where row n goes, up to J places, -1 for none; every target row is named at
most once. `scatter_rows` writes along it and `gather_sum` reads back along it: each is the other's adjoint, so the
backward of a move is the other move with the same table. No atomics anywhere: results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Wire:
    """Layout of one row on the wire, in bytes: the token, then K weights, then (forward only) K local expert ids.

    Weights travel in float32 (float64 beside float64 tokens), ids as int32, -1 in slots that belong to another rank.
    Rows are padded to 16 bytes, so that kernels may use 16-byte loads.
    """

    hidden: int
    slots: int
    dtype: torch.dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def weights_at(self) -> int:
        """Byte of a row where its weights begin."""
        return _padded(self.hidden * self.dtype.itemsize)

    @cached_property
    def experts_at(self) -> int:
        """Byte of a row where its expert ids begin."""
        return self.weights_at + self.slots * self.weight_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return _padded(self.experts_at + self.slots * 4)

    @property
    def grad_row_bytes(self) -> int:
        return _padded(self.experts_at)

    def tokens(self, rows: Tensor) -> Tensor:
        """`[N, D]` view of the tokens in `[N, bytes]` rows."""
        return rows[:, : self.hidden * self.dtype.itemsize].view(self.dtype)

    def weights(self, rows: Tensor) -> Tensor:
        """`[N, K]` view of the weights (or their gradients)."""
        return rows[:, self.weights_at : self.experts_at].view(self.weight_dtype)

    def experts(self, rows: Tensor) -> Tensor:
        """`[N, K]` int32 view of the local expert ids."""
        return rows[:, self.experts_at : self.experts_at + self.slots * 4].view(torch.int32)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


# Columns of the counts that ranks exchange ahead of the tokens: rows to come, invalid expert ids, tokens per expert.
ROWS, INVALID, TOKENS = 0, 1, 2

# An id that names no expert and is counted as invalid.
NO_EXPERT = -1


def without_nonfinite(experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The expert ids (int64), `NO_EXPERT` where the weight is NaN or infinite."""
    return experts_TK.masked_fill(~weights_TK.isfinite(), NO_EXPERT)


def plan_rows(experts_TK: Tensor, num_experts: int, ep_size: int) -> tuple[Tensor, Tensor]:
    """Number the rows to send: one a (token, destination rank).

    Args:
        experts_TK: int64 global expert ids.

    Returns:
        rank_TK: int32, the number of the row that carries slot (t, k), counted within its destination.
        counts_WC: int32 `[W, 2 + L]`: for each destination the rows to come, how many of this rank's ids lie outside
            `[0, E)` (the same in every row of the table: all ranks must learn of it) and the tokens of each of its
            experts. An id outside the range counts as the nearest expert, so that no kernel leaves its buffer before
            the host sees the count.
    """
    per_rank = num_experts // ep_size
    valid_TK = experts_TK.clamp(0, num_experts - 1)
    dest_TK = valid_TK // per_rank
    hit_TW = torch.zeros(experts_TK.shape[0], ep_size, dtype=torch.int32, device=experts_TK.device)
    hit_TW.scatter_(1, dest_TK, 1)
    rank_TK = (hit_TW.cumsum(0, dtype=torch.int32) - 1).gather(1, dest_TK)
    tokens = torch.zeros(num_experts, dtype=torch.int32, device=experts_TK.device)
    tokens.scatter_add_(0, valid_TK.reshape(-1), torch.ones_like(valid_TK.reshape(-1), dtype=torch.int32))
    invalid = (valid_TK != experts_TK).sum(dtype=torch.int32).expand(ep_size, 1)
    counts_WC = torch.cat([hit_TW.sum(0, dtype=torch.int32)[:, None], invalid, tokens.view(ep_size, per_rank)], 1)
    return rank_TK.to(torch.int32), counts_WC


def resolve_rows(
    experts_TK: Tensor,
    weights_TK: Tensor,
    rank_TK: Tensor,
    counts_WC: Tensor,
    ep_rank: int,
    num_experts: int,
    rows: Tensor,
    wire: Wire,
) -> tuple[Tensor, Tensor]:
    """Turn numbers within a destination into rows of the send buffer, and write each row's weights and expert ids.

    The send buffer holds the rows of the other destinations in order of rank, then this rank's own.

    Args:
        rank_TK, counts_WC: from `plan_rows`.
        rows: `[S, wire.row_bytes]` uint8; its weights and experts are written.

    Returns:
        row_TK: int32, the row that carries slot (t, k).
        first_TK: the same, but -1 for all slots of a row except its first: each row is named once.
    """
    per_rank = num_experts // counts_WC.shape[0]
    valid_TK = experts_TK.clamp(0, num_experts - 1)
    dest_TK = valid_TK // per_rank
    sizes_W = counts_WC[:, ROWS].clone()
    sizes_W[ep_rank] = 0
    starts_W = sizes_W.cumsum(0, dtype=torch.int32) - sizes_W
    starts_W[ep_rank] = sizes_W.sum()
    row_TK = starts_W[dest_TK] + rank_TK
    slots = row_TK.shape[1]
    earlier = torch.ones(slots, slots, dtype=torch.bool, device=row_TK.device).tril(-1)
    same_TKK = dest_TK[:, :, None] == dest_TK[:, None, :]
    first_TK = row_TK.masked_fill((same_TKK & earlier).any(-1), -1)
    local_TK = (valid_TK % per_rank).to(torch.int32)
    # Row of slot k carries all slots k' with the same destination, -1 elsewhere; writing it once per k is idempotent.
    carried_TKK = torch.where(same_TKK, local_TK[:, None, :], -1)
    flat = row_TK.reshape(-1).long()
    wire.experts(rows)[flat] = carried_TKK.reshape(-1, slots)
    wire.weights(rows)[flat] = weights_TK.detach().to(wire.weight_dtype).repeat_interleave(slots, 0)
    return row_TK.to(torch.int32), first_TK.to(torch.int32)


def index_rows(
    local_RK: Tensor, weights_RK: Tensor, counts_WC: Tensor, num_pairs: int, ep_rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (received row, local expert) pairs by expert, rows of one expert in the order received.

    Args:
        local_RK: int32 or int64 local expert ids, -1 where the slot belongs to another rank.
        counts_WC: int32, as received from each rank (`plan_rows`); its rows add up to R, its tokens to `num_pairs` (P).
        ep_rank: this rank, whose rows come first; those of the others follow in order. Kernels look at every rank's
            rows at the same time.

    Returns:
        pos_RK: int32 place of each pair, -1 for none. weights_P: its weight. offsets_L: int32 ends of the experts' rows.
    """
    tokens_L = counts_WC[:, TOKENS:].sum(0, dtype=torch.int32)
    num_local = tokens_L.shape[0]
    flat = local_RK.reshape(-1)
    key = torch.where(flat < 0, num_local, flat)
    order_P = torch.argsort(key, stable=True)[:num_pairs]
    pos_RK = torch.full_like(flat, -1, dtype=torch.int32)
    pos_RK[order_P] = torch.arange(num_pairs, dtype=torch.int32, device=flat.device)
    weights_P = weights_RK.reshape(-1)[order_P]
    return pos_RK.view_as(local_RK), weights_P, tokens_L.cumsum(0, dtype=torch.int32)


def scatter_rows(src_ND: Tensor, pos_NJ: Tensor, out_MD: Tensor) -> Tensor:
    """`out[pos[n, j]] = src[n]`. The positions name every row of `out` (a row-strided view is fine)."""
    num_rows = out_MD.shape[0]
    if num_rows and src_ND.shape[0]:
        flat = pos_NJ.reshape(-1).long()
        source = torch.zeros(num_rows + 1, dtype=torch.long, device=flat.device)
        slot = torch.arange(flat.shape[0], device=flat.device) // pos_NJ.shape[1]
        source[torch.where(flat < 0, num_rows, flat)] = slot
        out_MD.copy_(src_ND[source[:num_rows]])
    return out_MD


def gather_sum(src_MD: Tensor, pos_NJ: Tensor, out_ND: Tensor) -> Tensor:
    """`out[n] = sum over j of src[pos[n, j]]`, skipping -1, summed in float32 (float64 for float64)."""
    if src_MD.shape[0] == 0:
        return out_ND.zero_()
    dtype = torch.promote_types(src_MD.dtype, torch.float32)
    total_ND = torch.zeros(out_ND.shape, dtype=dtype, device=src_MD.device)
    for pos_N in pos_NJ.unbind(1):
        total_ND += torch.where((pos_N >= 0)[:, None], src_MD[pos_N.clamp(min=0).long()], 0)
    return out_ND.copy_(total_ND)


def gather_slots(src_P: Tensor, pos_NJ: Tensor, out_NJ: Tensor) -> Tensor:
    """`out[n, j] = src[pos[n, j]]`, 0 where the position is -1."""
    if src_P.shape[0] == 0:
        return out_NJ.zero_()
    return out_NJ.copy_(torch.where(pos_NJ >= 0, src_P[pos_NJ.clamp(min=0).long()], 0))


def read_slots(src_SK: Tensor, row_TK: Tensor) -> Tensor:
    """`out[t, k] = src[row[t, k], k]`: each slot's value from the row that carried it. Returns `[T, K]`."""
    if src_SK.shape[0] == 0:
        return src_SK.new_zeros(row_TK.shape)
    return src_SK[row_TK.long(), torch.arange(row_TK.shape[1], device=row_TK.device)]


def gather_grads(grad_PD: Tensor, grad_P: Tensor, pos_RK: Tensor, rows: Tensor, wire: Wire) -> None:
    """Fill `rows` (`[R, wire.grad_row_bytes]`) with the gradients of the tokens (summed) and of their weights."""
    gather_sum(grad_PD, pos_RK, wire.tokens(rows))
    gather_slots(grad_P, pos_RK, wire.weights(rows))


def read_grads(rows: Tensor, first_TK: Tensor, row_TK: Tensor, wire: Wire) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens, `[T, D]`, and of their weights, shaped as `first_TK`, from the rows that came back."""
    grad_TD = torch.empty(first_TK.shape[0], wire.hidden, dtype=wire.dtype, device=rows.device)
    gather_sum(wire.tokens(rows), first_TK, grad_TD)
    return grad_TD, read_slots(wire.weights(rows), row_TK).view(first_TK.shape)
