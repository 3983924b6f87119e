"""Experts as grouped GEMMs, with the input gradient and the weight gradient apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from lightning_ep.dispatch.base import ExpertRows, hand_over_in_backward
from lightning_ep.experts.activation import weighted_swiglu
from lightning_ep.experts.interface import ExpertsLayout
from lightning_ep.experts.wgrad import WeightGradQueue


def grouped_experts(
    module: nn.Module, layout: ExpertsLayout, rows: ExpertRows, layer: int, queue: WeightGradQueue | None
) -> Tensor:
    """The experts' outputs times their routing weights, `[P, D]`.

    Args:
        module: the experts module with its local parameters.
        rows: `rows_PD` in the dtype to compute in.
        queue: where weight gradients wait; None computes them in the backward.
    """
    linear = _GroupedLinear(rows, layer, queue)
    transposed = layout.is_transposed
    hidden = linear(rows.rows_PD, getattr(module, layout.up), transposed)
    if layout.has_bias:
        hidden = hidden + linear.bias(getattr(module, f"{layout.up}_bias"))
    hidden = hand_over_in_backward(hidden)
    # The down projection is linear, so the weight may go in front of it, where rows are shorter and memory is saved.
    weight_first = not layout.has_bias and not layout.has_post_expert_norm
    if weight_first and _is_plain_swiglu(module, layout):
        return linear(weighted_swiglu(hidden, rows.weights_P), module.down_proj, transposed)
    activated = module._apply_gate(hidden) if layout.has_gate else module.act_fn(hidden)
    if weight_first:
        return linear(_weighted(activated, rows.weights_P), module.down_proj, transposed)
    out = linear(activated, module.down_proj, transposed)
    if layout.has_bias:
        out = out + linear.bias(module.down_proj_bias)
    if layout.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return _weighted(out, rows.weights_P)


def _weighted(x_PD: Tensor, weights_P: Tensor) -> Tensor:
    return (x_PD * weights_P[:, None]).to(x_PD.dtype)


def _is_plain_swiglu(module: nn.Module, layout: ExpertsLayout) -> bool:
    """Whether the gate is transformers' default one around SiLU; any other is called, never rewritten."""
    gate = getattr(type(module), "_apply_gate", None)
    default = getattr(gate, "__name__", "") == "_default_apply_gate"
    act_fn = getattr(module, "act_fn", None)
    silu = isinstance(act_fn, nn.SiLU) or act_fn is F.silu or type(act_fn).__name__ == "SiLUActivation"
    return layout.has_gate and layout.is_concatenated and default and silu


class _GroupedLinear:
    """`x [P, in] -> [P, out]`, each expert's rows times its own weight."""

    def __init__(self, rows: ExpertRows, layer: int, queue: WeightGradQueue | None) -> None:
        self.offsets_L, self.counts, self.layer, self.queue = rows.offsets_L, rows.tokens_per_expert, layer, queue

    def __call__(self, x: Tensor, weight: nn.Parameter, transposed: bool) -> Tensor:
        return _GroupedLinearFunction.apply(x, weight, self, transposed)

    def bias(self, bias_LD: Tensor) -> Tensor:
        """Each row's bias, `[P, out]`; its backward sums rows by expert in order, without atomics."""
        return _RowBias.apply(bias_LD, self)


class _GroupedLinearFunction(Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, linear: _GroupedLinear, transposed: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.linear, ctx.transposed = weight, linear, transposed
        w = weight.detach().to(x.dtype)
        return grouped_mm(x, w if transposed else w.transpose(-1, -2), linear.offsets_L, linear.counts)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        linear, weight, transposed = ctx.linear, ctx.weight, ctx.transposed
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            w = weight.detach().to(x.dtype)
            grad_x = grouped_mm(grad, w.transpose(-1, -2) if transposed else w, linear.offsets_L, linear.counts)

        def weight_grad() -> Tensor:
            left, right = (x, grad) if transposed else (grad, x)
            return grouped_mm(left.t(), right, linear.offsets_L, linear.counts)

        if ctx.needs_input_grad[1]:
            if linear.queue is None:
                grad_weight = weight_grad().to(weight.dtype)
            else:
                linear.queue.push(weight, linear.layer, weight_grad)
        return grad_x, grad_weight, None, None


class _RowBias(Function):
    @staticmethod
    def forward(ctx, bias_LD: Tensor, linear: _GroupedLinear) -> Tensor:
        ctx.dtype = bias_LD.dtype
        counts_L = torch.diff(linear.offsets_L, prepend=linear.offsets_L.new_zeros(1))
        ctx.save_for_backward(counts_L)
        return bias_LD.repeat_interleave(counts_L, 0, output_size=sum(linear.counts))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PD: Tensor):
        (counts_L,) = ctx.saved_tensors
        rows = grad_PD.to(torch.promote_types(grad_PD.dtype, torch.float32))
        # unsafe: the lengths add up by construction; checking them would make the host wait
        grad_LD = torch.segment_reduce(rows, "sum", lengths=counts_L.long(), axis=0, unsafe=True, initial=0)
        return grad_LD.to(ctx.dtype), None


def grouped_mm(a: Tensor, b: Tensor, offsets_L: Tensor, counts: list[int]) -> Tensor:
    """`F.grouped_mm`, or a loop over experts where it does not run.

    Either `a [P, k]`, `b [L, k, n]` -> `[P, n]`, rows of `a` cut at `offsets_L`; or `a [m, P]`, `b [P, n]` ->
    `[L, m, n]`, the common axis cut. Every row is covered by an offset: the kernel leaves others uninitialised.
    """
    if _runs_grouped(a, b):
        return F.grouped_mm(a, b, offs=offsets_L)
    if b.dim() == 3:
        parts = [rows @ b[e] for e, rows in enumerate(a.split(counts)) if counts[e]]
        return torch.cat(parts) if parts else a.new_empty(0, b.shape[2])
    columns = zip(a.split(counts, 1), b.split(counts, 0), strict=True)
    return torch.stack([left @ right for left, right in columns])


def _runs_grouped(a: Tensor, b: Tensor) -> bool:
    if not hasattr(F, "grouped_mm") or a.dtype == torch.float64 or a.numel() == 0:
        return False
    if not a.is_cuda:
        return True
    if a.dtype != torch.bfloat16 or torch.cuda.get_device_capability(a.device) < (8, 0):
        return False
    # The kernel's loads need strides of a multiple of 16 bytes.
    return all(stride % 8 == 0 or stride == 1 for stride in (*a.stride(), *b.stride()))
