"""Triton twins of the functions in `permute.py`: the same names, arguments and results, one launch each.

Training spends more host time on launching kernels than on anything else, so a function is one kernel, and what a
kernel needs to know about the whole (where a destination's rows start, where an expert's rows start) it computes itself
from the small table of counts. Sizes that change with every call (N, M, P, R, T) are plain arguments: a new value
never compiles anything. Integer results are those of `permute.py`; sums run over the slots in order, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_ep.dispatch import permute
from lightning_ep.dispatch.permute import Wire
from lightning_ep.triton_kernel import ceil_div, kernel, next_power_of_2

ROWS, INVALID, TOKENS = tl.constexpr(permute.ROWS), tl.constexpr(permute.INVALID), tl.constexpr(permute.TOKENS)
NO_EXPERT = tl.constexpr(permute.NO_EXPERT)

# Slots that a program looks at in one step where it walks over many (the next step is loading meanwhile); its warps.
_SLOTS, _SLOT_WARPS = 4096, 16
# Experts that one program counts: few enough programs to leave the GPU's other work alone, all in one read.
_EXPERTS_AT_ONCE = tl.constexpr(4)
# Bytes of a row that one program moves: 32 a thread, as two 16-byte accesses.
_ROW_BYTES = 4096


def without_nonfinite(experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    named_TK = torch.empty(experts_TK.shape, dtype=torch.int64, device=experts_TK.device)
    if count := named_TK.numel():
        block = 1024
        tensors = experts_TK.contiguous(), weights_TK.contiguous(), named_TK
        _without_nonfinite((ceil_div(count, block), 1), tensors, (count,), (block,))
    return named_TK


@kernel(sizes=("count",))
def _without_nonfinite(experts, weights, named, count, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < count
    weight = tl.load(weights + slot, mask=inside, other=0)
    # Neither is below infinity.
    finite = tl.abs(weight) < float("inf")
    tl.store(named + slot, tl.where(finite, tl.load(experts + slot, mask=inside, other=0), NO_EXPERT), mask=inside)


def plan_rows(experts_TK: Tensor, num_experts: int, ep_size: int) -> tuple[Tensor, Tensor]:
    num_tokens, slots = experts_TK.shape
    counts_WC = torch.empty(
        ep_size, permute.TOKENS + num_experts // ep_size, dtype=torch.int32, device=experts_TK.device
    )
    rank_TK = torch.empty(num_tokens, slots, dtype=torch.int32, device=experts_TK.device)
    if num_tokens == 0:
        return rank_TK, counts_WC.zero_()
    padded = next_power_of_2(slots)
    _plan_rows(
        (ep_size + ceil_div(num_experts, _EXPERTS_AT_ONCE.value), 1),
        (experts_TK.contiguous(), rank_TK, counts_WC),
        (num_tokens,),
        (num_experts, ep_size, slots, padded, _SLOTS // padded, _SLOTS),
        _SLOT_WARPS,
    )
    return rank_TK, counts_WC


@kernel(sizes=("num_tokens",))
def _plan_rows(
    experts, rank, counts, num_tokens,
    E: tl.constexpr, W: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program w < W numbers the rows for destination w; the others count the tokens of a few experts each."""
    L: tl.constexpr = E // W
    C: tl.constexpr = TOKENS + L
    pid = tl.program_id(0)
    if pid < W:
        k = tl.arange(0, PADDED_K)[None, :]
        t = tl.arange(0, BLOCK_T)[:, None]
        rows = 0
        invalid_TK = tl.zeros((BLOCK_T, PADDED_K), tl.int32)
        for start in tl.range(0, num_tokens, BLOCK_T, num_stages=2):
            inside = (start + t < num_tokens) & (k < K)
            slot = (start + t) * K + k
            ids = tl.load(experts + slot, mask=inside, other=0)
            valid = tl.minimum(tl.maximum(ids, 0), E - 1)
            invalid_TK += (valid != ids).to(tl.int32)
            here = inside & (valid >= pid * L) & (valid < pid * L + L)
            hit = tl.max(here.to(tl.int32), 1)
            number = rows + tl.cumsum(hit, 0) - 1
            tl.store(rank + slot, tl.broadcast_to(number[:, None], (BLOCK_T, PADDED_K)), mask=here)
            rows += tl.sum(hit)
        tl.store(counts + pid * C + ROWS, rows)
        tl.store(counts + pid * C + INVALID, tl.sum(tl.sum(invalid_TK, 1)))
    else:
        # Each lane keeps its counts of the experts side by side in one integer, 16 bits each.
        first = (pid - W) * _EXPERTS_AT_ONCE
        tokens = tl.zeros((BLOCK_S,), tl.int64)
        for start in tl.range(0, num_tokens * K, BLOCK_S, num_stages=2):
            slot = start + tl.arange(0, BLOCK_S)
            inside = slot < num_tokens * K
            ids = tl.load(experts + slot, mask=inside, other=0)
            nth = tl.minimum(tl.maximum(ids, 0), E - 1) - first
            here = inside & (nth >= 0) & (nth < _EXPERTS_AT_ONCE)
            tokens += tl.where(here, tl.full((BLOCK_S,), 1, tl.int64) << (nth * 16), 0)
        for n in tl.static_range(_EXPERTS_AT_ONCE):
            e = first + n
            count = tl.sum(((tokens >> (16 * n)) & 0xFFFF).to(tl.int32))
            tl.store(counts + (e // L) * C + TOKENS + e % L, count, mask=e < E)


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
    num_slots, slots = experts_TK.numel(), experts_TK.shape[1]
    row_TK, first_TK = torch.empty_like(rank_TK), torch.empty_like(rank_TK)
    if num_slots:
        weight_dtype = tl.float64 if wire.weight_dtype == torch.float64 else tl.float32
        block = 128
        _resolve_rows(
            (ceil_div(num_slots, block), 1),
            (experts_TK.contiguous(), weights_TK.detach().contiguous(), rank_TK, counts_WC, row_TK, first_TK, rows),
            (num_slots, ep_rank),
            (
                wire.row_bytes, wire.weights_at, wire.experts_at, weight_dtype,
                num_experts, counts_WC.shape[0], slots, next_power_of_2(slots), block,
            ),
        )  # fmt: skip
    return row_TK, first_TK


@kernel(sizes=("num_slots", "ep_rank"))
def _resolve_rows(
    experts, weights, rank, counts, row_out, first_out, wire, num_slots, ep_rank,
    WIRE_STRIDE: tl.constexpr, WEIGHTS_AT: tl.constexpr, EXPERTS_AT: tl.constexpr, WEIGHT_DTYPE: tl.constexpr,
    E: tl.constexpr, W: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program handles BLOCK slots s, each beside all slots j of its token."""
    L: tl.constexpr = E // W
    C: tl.constexpr = TOKENS + L
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < num_slots
    ids = tl.load(experts + s, mask=inside, other=0)
    dest = tl.minimum(tl.maximum(ids, 0), E - 1).to(tl.int32) // L
    row = tl.load(rank + s, mask=inside, other=0)
    # Own rows come last.
    order = tl.where(dest == ep_rank, W, dest)
    for w in range(W):
        row += tl.where(order > tl.where(w == ep_rank, W, w), tl.load(counts + w * C + ROWS), 0)

    j = tl.arange(0, PADDED_K)[None, :]
    inside_j = inside[:, None] & (j < K)
    sibling = (s // K * K)[:, None] + j
    ids_j = tl.load(experts + sibling, mask=inside_j, other=0)
    ids_j = tl.minimum(tl.maximum(ids_j, 0), E - 1).to(tl.int32)
    same = (ids_j // L == dest[:, None]) & (j < K)
    is_first = tl.max((same & (j < (s % K)[:, None])).to(tl.int32), 1) == 0
    tl.store(row_out + s, row, mask=inside)
    tl.store(first_out + s, tl.where(is_first, row, -1), mask=inside)

    # The first slot of a row writes what travels with it.
    writes = inside_j & is_first[:, None]
    start = wire + row.to(tl.int64)[:, None] * WIRE_STRIDE
    tl.store((start + EXPERTS_AT).to(tl.pointer_type(tl.int32)) + j, tl.where(same, ids_j % L, -1), mask=writes)
    weights_j = tl.load(weights + sibling, mask=writes, other=0).to(WEIGHT_DTYPE)
    tl.store((start + WEIGHTS_AT).to(tl.pointer_type(WEIGHT_DTYPE)) + j, weights_j, mask=writes)


def index_rows(
    local_RK: Tensor, weights_RK: Tensor, counts_WC: Tensor, num_pairs: int, ep_rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, slots = local_RK.shape
    ep_size, num_local = counts_WC.shape[0], counts_WC.shape[1] - permute.TOKENS
    pos_RK = torch.empty(num_rows, slots, dtype=torch.int32, device=local_RK.device)
    weights_P = torch.empty(num_pairs, dtype=weights_RK.dtype, device=local_RK.device)
    offsets_L = torch.empty(num_local, dtype=torch.int32, device=local_RK.device)
    if num_rows == 0:
        return pos_RK, weights_P, offsets_L.zero_()
    _index_rows(
        (num_local, ep_size),
        (local_RK, weights_RK, counts_WC, pos_RK, weights_P, offsets_L),
        (ep_rank,),
        (
            local_RK.stride(0), weights_RK.stride(0), ep_size, next_power_of_2(ep_size),
            num_local, next_power_of_2(num_local), slots, _SLOTS,
        ),
        _SLOT_WARPS,
    )  # fmt: skip
    return pos_RK, weights_P, offsets_L


# Wide accesses would give slots to threads in another order than the scattered stores have, and the scan be done twice.
@kernel(sizes=("ep_rank",), scalar=("local", "weights", "pos_out"))
def _index_rows(
    local, weights, counts, pos_out, weights_out, offsets_out, ep_rank,
    ID_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, W: tl.constexpr, PADDED_W: tl.constexpr,
    L: tl.constexpr, PADDED_L: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (l, w) places the pairs of expert l that came from rank w; the counts say where both begin."""
    C: tl.constexpr = TOKENS + L
    expert, source = tl.program_id(0), tl.program_id(1)
    w = tl.arange(0, PADDED_W)
    l = tl.arange(0, PADDED_L)
    # Own rows come first, then those of the other ranks in order.
    before = (w < W) & (tl.where(w == ep_rank, -1, w) < tl.where(source == ep_rank, -1, source))
    num_rows = tl.load(counts + source * C + ROWS)
    first_row = tl.sum(tl.load(counts + w * C + ROWS, mask=before, other=0))
    tokens_WL = tl.load(
        counts + (w * C)[:, None] + TOKENS + l[None, :], mask=(w < W)[:, None] & (l <= expert)[None, :], other=0
    )
    end = tl.sum(tl.sum(tokens_WL, 1))
    place = tl.sum(tl.sum(tl.where((l < expert)[None, :] | before[:, None], tokens_WL, 0), 1))
    if source == 0:
        tl.store(offsets_out + expert, end)

    for start in tl.range(0, num_rows * K, BLOCK, num_stages=2):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < num_rows * K
        row = (first_row + slot // K).to(tl.int64)
        ids = tl.load(local + row * ID_STRIDE + slot % K, mask=inside, other=-1)
        hit = ids == expert
        pos = place + tl.cumsum(hit.to(tl.int32), 0) - 1
        weight = tl.load(weights + row * WEIGHT_STRIDE + slot % K, mask=hit, other=0)
        tl.store(weights_out + pos, weight, mask=hit)
        # The first expert's programs also mark the slots that belong to no expert here.
        none = inside & (ids + expert == -1)
        tl.store(pos_out + first_row * K + slot, tl.where(hit, pos, -1), mask=hit | none)
        place += tl.sum(hit.to(tl.int32))


def scatter_rows(src_ND: Tensor, pos_NJ: Tensor, out_MD: Tensor) -> Tensor:
    num_rows, width = src_ND.shape
    if num_rows and out_MD.shape[0]:
        src_ND = _with_dense_rows(src_ND)
        block, warps = _blocking(width, out_MD)
        _scatter_rows(
            (num_rows, ceil_div(width, block)),
            (src_ND, pos_NJ.contiguous(), out_MD),
            constants=(src_ND.stride(0), out_MD.stride(0), width, pos_NJ.shape[1], block),
            num_warps=warps,
        )
    return out_MD


@kernel()
def _scatter_rows(
    src, pos, out,
    SRC_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, D: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(src + n * SRC_STRIDE + d, mask=d < D, other=0).to(out.dtype.element_ty)
    for j in tl.static_range(J):
        m = tl.load(pos + n * J + j).to(tl.int64)
        tl.store(out + m * OUT_STRIDE + d, x, mask=d < tl.where(m >= 0, D, 0))


def gather_sum(src_MD: Tensor, pos_NJ: Tensor, out_ND: Tensor) -> Tensor:
    num_rows, width = out_ND.shape
    if src_MD.shape[0] == 0:
        return out_ND.zero_()
    if num_rows:
        src_MD = _with_dense_rows(src_MD)
        block, warps = _blocking(width, out_ND)
        _gather_sum(
            (num_rows, ceil_div(width, block)),
            (src_MD, pos_NJ.contiguous(), out_ND),
            constants=(src_MD.stride(0), out_ND.stride(0), width, pos_NJ.shape[1], block),
            num_warps=warps,
        )
    return out_ND


@kernel()
def _gather_sum(
    src, pos, out,
    SRC_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, D: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = _sum_of_places(src, pos + n * J, d, SRC_STRIDE, D, J, BLOCK)
    tl.store(out + n * OUT_STRIDE + d, total.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _sum_of_places(
    src, places, d, STRIDE: tl.constexpr, D: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    DTYPE: tl.constexpr = tl.float64 if src.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK,), DTYPE)
    for j in tl.static_range(J):
        m = tl.load(places + j).to(tl.int64)
        total += tl.load(src + m * STRIDE + d, mask=d < tl.where(m >= 0, D, 0), other=0).to(DTYPE)
    return total


def gather_slots(src_P: Tensor, pos_NJ: Tensor, out_NJ: Tensor) -> Tensor:
    num_slots = pos_NJ.numel()
    if src_P.shape[0] == 0:
        return out_NJ.zero_()
    if num_slots:
        block = 1024
        _gather_slots(
            (ceil_div(num_slots, block), 1),
            (src_P.contiguous(), pos_NJ.contiguous(), out_NJ),
            (num_slots,),
            (out_NJ.stride(0), pos_NJ.shape[1], block),
        )
    return out_NJ


@kernel(sizes=("num_slots",))
def _gather_slots(src, pos, out, num_slots, OUT_STRIDE: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(pos + s, mask=s < num_slots, other=-1)
    value = tl.load(src + place, mask=place >= 0, other=0)
    tl.store(out + (s // J).to(tl.int64) * OUT_STRIDE + s % J, value, mask=s < num_slots)


def read_slots(src_SK: Tensor, row_TK: Tensor) -> Tensor:
    num_slots = row_TK.numel()
    out_TK = torch.empty(row_TK.shape, dtype=src_SK.dtype, device=src_SK.device)
    if src_SK.shape[0] == 0:
        return out_TK.zero_()
    if num_slots:
        block = 1024
        _read_slots(
            (ceil_div(num_slots, block), 1),
            (src_SK, row_TK.contiguous(), out_TK),
            (num_slots,),
            (src_SK.stride(0), row_TK.shape[1], block),
        )
    return out_TK


@kernel(sizes=("num_slots",))
def _read_slots(src, row, out, num_slots, SRC_STRIDE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(row + s, mask=s < num_slots, other=0).to(tl.int64)
    tl.store(out + s, tl.load(src + r * SRC_STRIDE + s % K, mask=s < num_slots), mask=s < num_slots)


def gather_grads(grad_PD: Tensor, grad_P: Tensor, pos_RK: Tensor, rows: Tensor, wire: Wire) -> None:
    num_rows, slots = pos_RK.shape
    if grad_PD.shape[0] == 0:
        rows.zero_()
    elif num_rows:
        grad_PD = _with_dense_rows(grad_PD)
        block, warps = _blocking(wire.hidden, grad_PD)
        _gather_grads(
            (num_rows, ceil_div(wire.hidden, block)),
            (grad_PD, grad_P.contiguous(), pos_RK, rows),
            constants=(
                grad_PD.stride(0), wire.grad_row_bytes, wire.weights_at,
                wire.hidden, slots, next_power_of_2(slots), block,
            ),
            num_warps=warps,
        )  # fmt: skip


@kernel()
def _gather_grads(
    grad_rows, grad_weights, pos, wire,
    GRAD_STRIDE: tl.constexpr, WIRE_STRIDE: tl.constexpr, WEIGHTS_AT: tl.constexpr,
    D: tl.constexpr, J: tl.constexpr, PADDED_J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = grad_rows.dtype.element_ty
    WEIGHT_DTYPE: tl.constexpr = grad_weights.dtype.element_ty
    start = wire + n * WIRE_STRIDE
    if tl.program_id(1) == 0:
        j = tl.arange(0, PADDED_J)
        place = tl.load(pos + n * J + j, mask=j < J, other=-1)
        weight = tl.load(grad_weights + place, mask=place >= 0, other=0)
        tl.store((start + WEIGHTS_AT).to(tl.pointer_type(WEIGHT_DTYPE)) + j, weight, mask=j < J)
    total = _sum_of_places(grad_rows, pos + n * J, d, GRAD_STRIDE, D, J, BLOCK)
    tl.store(start.to(tl.pointer_type(DTYPE)) + d, total.to(DTYPE), mask=d < D)


def read_grads(rows: Tensor, first_TK: Tensor, row_TK: Tensor, wire: Wire) -> tuple[Tensor, Tensor]:
    num_tokens, slots = first_TK.shape
    grad_TD = torch.empty(num_tokens, wire.hidden, dtype=wire.dtype, device=rows.device)
    grad_TK = torch.empty(num_tokens, slots, dtype=wire.weight_dtype, device=rows.device)
    if num_tokens:
        block, warps = _blocking(wire.hidden, grad_TD)
        _read_grads(
            (num_tokens, ceil_div(wire.hidden, block)),
            (rows, first_TK, row_TK, grad_TD, grad_TK),
            constants=(
                wire.grad_row_bytes, wire.weights_at, wire.slots,
                wire.hidden, slots, next_power_of_2(slots), block,
            ),
            num_warps=warps,
        )  # fmt: skip
    return grad_TD, grad_TK


@kernel()
def _read_grads(
    wire, first, row, grad_tokens, grad_weights,
    WIRE_STRIDE: tl.constexpr, WEIGHTS_AT: tl.constexpr, WIRE_SLOTS: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = grad_tokens.dtype.element_ty
    WEIGHT_DTYPE: tl.constexpr = grad_weights.dtype.element_ty
    if tl.program_id(1) == 0:
        k = tl.arange(0, PADDED_K)
        carrier = tl.load(row + n * K + k, mask=k < K, other=0).to(tl.int64)
        # A row has one slot, not K, where each expert got a row of its own.
        weights = (wire + carrier * WIRE_STRIDE + WEIGHTS_AT).to(tl.pointer_type(WEIGHT_DTYPE)) + k % WIRE_SLOTS
        tl.store(grad_weights + n * K + k, tl.load(weights, mask=k < K), mask=k < K)
    STRIDE: tl.constexpr = WIRE_STRIDE // (DTYPE.primitive_bitwidth // 8)
    total = _sum_of_places(wire.to(tl.pointer_type(DTYPE)), first + n * K, d, STRIDE, D, K, BLOCK)
    tl.store(grad_tokens + n * D + d, total.to(DTYPE), mask=d < D)


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _blocking(width: int, rows: Tensor) -> tuple[int, int]:
    """Elements of a row that one program moves, and its warps: 32 bytes a thread."""
    block = min(next_power_of_2(width), _ROW_BYTES // rows.element_size())
    return block, max(1, min(4, block * rows.element_size() // 1024))
