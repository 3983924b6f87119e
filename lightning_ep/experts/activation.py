"""SwiGLU with the routing weight folded in: one kernel forward, one backward, instead of five and more.

The routing weight may go in front of the down projection, which is linear; rows are shorter there than behind it.
Computed in float32 (float64 for float64) and rounded once, on CPU and GPU alike.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ep.imports import is_available


def forward(h_P2I: Tensor, weights_P: Tensor) -> Tensor:
    """`silu(gate) * up * weight`, `[P, I]`.

    Args:
        h_P2I: gate in the first half of each row, up in the second.
        weights_P: float32 (float64 beside float64).
    """
    if _runs_triton(h_P2I):
        from lightning_ep.experts import activation_kernels

        return activation_kernels.forward(h_P2I, weights_P)
    gate, up = h_P2I.to(weights_P.dtype).chunk(2, -1)
    return (F.silu(gate) * up * weights_P[:, None]).to(h_P2I.dtype)


def backward(grad_PI: Tensor, h_P2I: Tensor, weights_P: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `h` and of the weights."""
    if _runs_triton(h_P2I):
        from lightning_ep.experts import activation_kernels

        return activation_kernels.backward(grad_PI.contiguous(), h_P2I, weights_P)
    gate, up = h_P2I.to(weights_P.dtype).chunk(2, -1)
    grad = grad_PI.to(weights_P.dtype)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_weights_P = (grad * silu * up).sum(-1)
    grad = grad * weights_P[:, None]
    grad_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.cat([grad_gate, grad * silu], -1).to(h_P2I.dtype), grad_weights_P


def _runs_triton(x: Tensor) -> bool:
    return x.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return is_available("triton")
