"""The weighted SwiGLU against autograd through plain operations, and its kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_ep.experts import activation, activation_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def _inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    h = (2 * torch.randn(rows, 2 * width)).to(dtype)
    return h, torch.rand(rows).to(weight_dtype), torch.randn(rows, width).to(dtype)


@pytest.mark.parametrize("rows", [6, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_autograd_and_rounds_once(dtype: torch.dtype, rows: int) -> None:
    """Value and gradients are those of a float64 computation, rounded to their dtype."""
    h, weights, grad = _inputs(rows, 20, dtype)
    out = activation.forward(h, weights)
    grads = activation.backward(grad, h, weights)
    exact_h, exact_weights = (x.detach().double().requires_grad_() for x in (h, weights))
    gate, up = exact_h.chunk(2, -1)
    exact = F.silu(gate) * up * exact_weights[:, None]
    exact.backward(grad.double())
    for actual, expected in zip((out, *grads), (exact, exact_h.grad, exact_weights.grad), strict=True):
        # A rounding of the exact value, and float32's error before it.
        eps = torch.finfo(actual.dtype).eps
        torch.testing.assert_close(actual.double(), expected, rtol=0.5 * eps + 1e-6 * (eps > 1e-10), atol=2e-6)


@pytest.mark.parametrize("rows, width", [(5, 24), (2, 1030), (0, 8), (3, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels(rows: int, width: int, dtype: torch.dtype) -> None:
    h, weights, grad = _inputs(rows, width, dtype)
    # Float64 to a few units, float32 to another order of summation, and one unit where the interpreter cuts off.
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    expected = (activation.forward(h, weights), *activation.backward(grad, h, weights))
    actual = (activation_kernels.forward(h, weights), *activation_kernels.backward(grad, h, weights))
    for mine, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)
