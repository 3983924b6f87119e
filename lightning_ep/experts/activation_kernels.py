"""Triton twins of `activation.forward` and `activation.backward`, one kernel each."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lightning_ep.triton_kernel import ceil_div, kernel, next_power_of_2


def forward(h_P2I: Tensor, weights_P: Tensor) -> Tensor:
    num_rows, width = h_P2I.shape[0], h_P2I.shape[1] // 2
    out_PI = torch.empty(num_rows, width, dtype=h_P2I.dtype, device=h_P2I.device)
    if out_PI.numel():
        block = _block(width)
        grid = (num_rows, ceil_div(width, block))
        _forward(grid, (h_P2I, weights_P, out_PI), constants=(width, block), num_warps=_warps(block))
    return out_PI


def backward(grad_PI: Tensor, h_P2I: Tensor, weights_P: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, width = grad_PI.shape
    grad_h_P2I, grad_weights_P = torch.empty_like(h_P2I), torch.empty_like(weights_P)
    if num_rows:
        block = _block(width)
        tensors = grad_PI, h_P2I, weights_P, grad_h_P2I, grad_weights_P
        _backward((num_rows, 1), tensors, constants=(width, block), num_warps=_warps(block))
    return grad_h_P2I, grad_weights_P


def _block(width: int) -> int:
    return min(next_power_of_2(width), 1024)


def _warps(block: int) -> int:
    return max(1, min(4, block // 256))


@kernel()
def _forward(h, weights, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    weight = tl.load(weights + p)
    gate = tl.load(h + p * 2 * WIDTH + i, mask=inside, other=0).to(weight.dtype)
    up = tl.load(h + p * 2 * WIDTH + WIDTH + i, mask=inside, other=0).to(weight.dtype)
    silu = gate * (1 / (1 + tl.exp(-gate)))
    tl.store(out + p * WIDTH + i, (silu * up * weight).to(out.dtype.element_ty), mask=inside)


@kernel()
def _backward(grad_out, h, weights, grad_h, grad_weights, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + p)
    grad_weight = tl.zeros((BLOCK,), weight.dtype)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < WIDTH
        grad = tl.load(grad_out + p * WIDTH + i, mask=inside, other=0).to(weight.dtype)
        gate = tl.load(h + p * 2 * WIDTH + i, mask=inside, other=0).to(weight.dtype)
        up = tl.load(h + p * 2 * WIDTH + WIDTH + i, mask=inside, other=0).to(weight.dtype)
        sigmoid = 1 / (1 + tl.exp(-gate))
        silu = gate * sigmoid
        grad_weight += grad * silu * up
        grad *= weight
        grad_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        tl.store(grad_h + p * 2 * WIDTH + i, grad_gate.to(grad_h.dtype.element_ty), mask=inside)
        tl.store(grad_h + p * 2 * WIDTH + WIDTH + i, (grad * silu).to(grad_h.dtype.element_ty), mask=inside)
    tl.store(grad_weights + p, tl.sum(grad_weight))
