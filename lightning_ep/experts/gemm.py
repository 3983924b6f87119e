"""The products of a linear layer of experts: each local expert's rows with its own weight, in one call.

    P  rows of all local experts, sorted by expert        L  local experts        i, o  features in and out

A backend (PyTorch here, Transformer Engine in its own file) has the three products of forward and backward; everything
around them is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ep.imports import is_available

# torch has no public name for it yet.
_set_sm_carveout = getattr(torch._C, "_set_sm_carveout_experimental", None)


@dataclass(frozen=True)
class Split:
    """Which rows are whose. `offsets_L`: int32, where each expert's rows end. `counts`: rows of each, on the host."""

    offsets_L: Tensor
    counts: list[int]


class Gemm(Protocol):
    """A backend. Everything is contiguous and of one dtype, which is the result's; an expert may have no rows.

    Weights are `[L, o, i]`, or `[L, i, o]` where `transposed`; so are their gradients.
    """

    row_multiple: int  # each expert's rows are a multiple of this

    def product(self, x_Pi: Tensor, weight: Tensor, split: Split, transposed: bool) -> Tensor:
        """`[P, o]`."""

    def input_grad(self, grad_Po: Tensor, weight: Tensor, split: Split, transposed: bool) -> Tensor:
        """`[P, i]`."""

    def weight_grad(self, grad_Po: Tensor, x_Pi: Tensor, split: Split, transposed: bool) -> Tensor:
        """The weight's gradient; zeros for an expert without rows."""

    def add_weight_grad(self, out: Tensor, grad_Po: Tensor, x_Pi: Tensor, split: Split, transposed: bool) -> None:
        """Add the weight's gradient to `out`, of the same dtype or float32, with no temporary of its size."""


def gemm_backend(implementation: str, spared_sms: Callable[[], int]) -> Callable[[], Gemm]:
    """Makes the backend of one forward: "grouped_mm", or "transformer_engine" in the FP8 recipe around it, if any.

    Args:
        spared_sms: multiprocessors to leave to an exchange, see `TorchGemm`.
    """
    if implementation == "grouped_mm":
        return lambda: TorchGemm(spared_sms())
    from lightning_ep.experts.transformer_engine import TransformerEngineGemm

    return TransformerEngineGemm.in_context


class TorchGemm:
    """`F.grouped_mm`, and a loop over experts where that does not run.

    Args:
        spared_sms: multiprocessors (SMs) of the GPU to leave to an exchange that runs beside. The kernel keeps one block
            an SM for its whole life; blocks whose SM is taken would run after all others, in twice the time.
    """

    row_multiple = 1

    def __init__(self, spared_sms: int = 0) -> None:
        self.spared_sms = spared_sms

    def product(self, x_Pi: Tensor, weight: Tensor, split: Split, transposed: bool) -> Tensor:
        return self._matmul(x_Pi, weight if transposed else weight.transpose(1, 2), split)

    def input_grad(self, grad_Po: Tensor, weight: Tensor, split: Split, transposed: bool) -> Tensor:
        return self._matmul(grad_Po, weight.transpose(1, 2) if transposed else weight, split)

    def weight_grad(self, grad_Po: Tensor, x_Pi: Tensor, split: Split, transposed: bool) -> Tensor:
        return self._outer(x_Pi, grad_Po, split) if transposed else self._outer(grad_Po, x_Pi, split)

    def add_weight_grad(self, out: Tensor, grad_Po: Tensor, x_Pi: Tensor, split: Split, transposed: bool) -> None:
        left, right = (x_Pi, grad_Po) if transposed else (grad_Po, x_Pi)
        if left.is_cuda and out.dtype != left.dtype and is_available("triton"):
            from lightning_ep.experts import wgrad_kernels

            wgrad_kernels.add_outer(out, left, right, split.offsets_L)
        else:
            add_outer(out, left, right, split)

    def _matmul(self, a_Pk: Tensor, b_Lkn: Tensor, split: Split) -> Tensor:
        """`[P, n]`."""
        # Every row is covered by an offset: the kernel leaves others uninitialised.
        if _runs_grouped(a_Pk, b_Lkn):
            return self._grouped_mm(a_Pk, b_Lkn, split)
        parts = [rows @ b_Lkn[e] for e, rows in enumerate(a_Pk.split(split.counts)) if len(rows)]
        return torch.cat(parts) if parts else a_Pk.new_empty(0, b_Lkn.shape[2])

    def _outer(self, left_Pm: Tensor, right_Pn: Tensor, split: Split) -> Tensor:
        """`[L, m, n]`: each expert's `left^T right`."""
        if _runs_grouped(left_Pm.t(), right_Pn):
            return self._grouped_mm(left_Pm.t(), right_Pn, split)
        pairs = zip(left_Pm.split(split.counts), right_Pn.split(split.counts), strict=True)
        return torch.stack([left.t() @ right for left, right in pairs])

    def _grouped_mm(self, a: Tensor, b: Tensor, split: Split) -> Tensor:
        if not self.spared_sms or _set_sm_carveout is None:
            return F.grouped_mm(a, b, offs=split.offsets_L)
        # For this call only: other GEMMs would choose other kernels, with other bits.
        _set_sm_carveout(self.spared_sms)
        try:
            return F.grouped_mm(a, b, offs=split.offsets_L)
        finally:
            _set_sm_carveout(None)


def add_outer(out_Lmn: Tensor, left_Pm: Tensor, right_Pn: Tensor, split: Split) -> None:
    """`out += left^T right`, a GEMM an expert."""
    each = zip(out_Lmn.unbind(), left_Pm.split(split.counts), right_Pn.split(split.counts), strict=True)
    for out, left, right in each:
        if not len(left):
            continue
        if out.dtype == left.dtype:
            out.addmm_(left.t(), right)
        elif left.is_cuda and _adds_to_float32(left.dtype, left.device):
            torch.addmm(out, left.t(), right, out_dtype=out.dtype, out=out)
        else:  # the temporary is one expert's
            out.add_(left.t() @ right)


@cache
def _adds_to_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuBLAS adds a half-precision product to a float32 matrix: torch has the argument since 2.8, and takes a
    float32 summand since later."""
    x = torch.ones(16, 16, dtype=dtype, device=device)
    out = torch.ones(16, 16, device=device)
    try:
        torch.addmm(out, x, x, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return False
    return out[0, 0].item() == 17


def _runs_grouped(a: Tensor, b: Tensor) -> bool:
    if not hasattr(F, "grouped_mm") or a.dtype == torch.float64 or a.numel() == 0:
        return False
    if a.is_cuda and (a.dtype != torch.bfloat16 or torch.cuda.get_device_capability(a.device) < (8, 0)):
        return False
    # The kernel's loads need strides of a multiple of 16 bytes; the CPU's twin insists too.
    return all(stride * a.itemsize % 16 == 0 or stride == 1 for stride in (*a.stride(), *b.stride()))
