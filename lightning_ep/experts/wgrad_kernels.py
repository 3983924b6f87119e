"""Triton twin of `gemm.add_outer`: half-precision products added to a float32 gradient, one kernel for all experts.

Unlike a product followed by an addition it needs no temporary, and reads and writes the gradient once.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from lightning_ep.triton_kernel import ceil_div, kernel

# Tile of the gradient [m, n], and rows a step.
_TILE, _ROWS, _WARPS = (128, 256), 64, 8


def add_outer(out_Lmn: Tensor, left_Pm: Tensor, right_Pn: Tensor, offsets_L: Tensor) -> None:
    """`out[e] += left[rows of e]^T right[rows of e]`; all contiguous, `out` float32."""
    num_experts, m, n = out_Lmn.shape
    assert out_Lmn.is_contiguous() and left_Pm.is_contiguous() and right_Pn.is_contiguous()
    if left_Pm.numel():
        tile_m, tile_n = _TILE
        _add_outer(
            (ceil_div(m, tile_m) * ceil_div(n, tile_n), num_experts),
            (out_Lmn, left_Pm, right_Pn, offsets_L),
            constants=(m, n, tile_m, tile_n, _ROWS),
            num_warps=_WARPS,
        )


@kernel()
def _add_outer(
    out, left, right, offsets,
    M: tl.constexpr, N: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    first = tl.load(offsets + e - 1, mask=e > 0, other=0)
    end = tl.load(offsets + e)
    # Neighbouring programs share their columns of `right`, so that these stay in the L2 cache.
    tiles_m: tl.constexpr = (M + TILE_M - 1) // TILE_M
    m = (tl.program_id(0) % tiles_m) * TILE_M + tl.arange(0, TILE_M)
    n = (tl.program_id(0) // tiles_m) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        inside = (row < end)[:, None]
        a = tl.load(left + at * M + m[None, :], mask=inside & (m < M)[None, :], other=0)
        b = tl.load(right + at * N + n[None, :], mask=inside & (n < N)[None, :], other=0)
        total = tl.dot(tl.trans(a), b, total)
    if first < end:
        place = out + e * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
        tl.store(place, tl.load(place, mask=inside, other=0) + total, mask=inside)
