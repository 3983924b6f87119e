"""Experts as grouped GEMMs, with the input gradient and the weight gradient apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from lightning_ep.dispatch.base import ExpertRows, hand_over_in_backward
from lightning_ep.experts import activation
from lightning_ep.experts.interface import ExpertsLayout
from lightning_ep.experts.wgrad import WeightGradQueue
from lightning_ep.schedule.turns import BACKWARD, hand_over


def grouped_experts(
    module: nn.Module, layout: ExpertsLayout, rows: ExpertRows, layer: int, queue: WeightGradQueue | None
) -> Tensor:
    """The experts' outputs times their routing weights, `[P, D]`.

    Args:
        module: the experts module with its local parameters.
        rows: `rows_PD` in the dtype to compute in.
        queue: where weight gradients wait; None computes them in the backward.
    """
    linear = _GroupedLinear(rows, layer, queue, layout.is_transposed)
    up, down = getattr(module, layout.up), module.down_proj
    # The down projection is linear, so the weight may go in front of it, where rows are shorter and memory is saved.
    weight_first = not layout.has_bias and not layout.has_post_expert_norm
    if weight_first and _is_plain_swiglu(module, layout):
        return _SwiGLUExperts.apply(rows.rows_PD, rows.weights_P, up, down, linear)
    hidden = _Linear.apply(rows.rows_PD, up, linear)
    if layout.has_bias:
        hidden = hidden + _RowBias.apply(getattr(module, f"{layout.up}_bias"), linear)
    hidden = hand_over_in_backward(hidden)
    activated = module._apply_gate(hidden) if layout.has_gate else module.act_fn(hidden)
    if weight_first:
        return _Linear.apply(_weighted(activated, rows.weights_P), down, linear)
    out = _Linear.apply(activated, down, linear)
    if layout.has_bias:
        out = out + _RowBias.apply(module.down_proj_bias, linear)
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


@dataclass(frozen=True)
class _GroupedLinear:
    """`x [P, in] -> [P, out]`, each expert's rows times its own weight `[L, out, in]` (or transposed), and its gradients."""

    rows: ExpertRows
    layer: int
    queue: WeightGradQueue | None
    transposed: bool

    def product(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        w = weight.detach().to(x.dtype)
        return self._grouped_mm(x, w if self.transposed else w.transpose(-1, -2))

    def input_grad(self, grad: Tensor, weight: nn.Parameter) -> Tensor:
        w = weight.detach().to(grad.dtype)
        return self._grouped_mm(grad, w.transpose(-1, -2) if self.transposed else w)

    def weight_grad(self, grad: Tensor, x: Tensor, weight: nn.Parameter) -> Tensor | None:
        """The weight's gradient, or None when it waits in the queue."""

        def compute() -> Tensor:
            left, right = (x, grad) if self.transposed else (grad, x)
            return self._grouped_mm(left.t(), right)

        if self.queue is None:
            return compute().to(weight.dtype)
        self.queue.push(weight, self.layer, compute)
        return None

    def _grouped_mm(self, a: Tensor, b: Tensor) -> Tensor:
        return grouped_mm(a, b, self.rows.offsets_L, self.rows.tokens_per_expert)


class _Linear(Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, linear: _GroupedLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.linear = weight, linear
        return linear.product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = ctx.linear.input_grad(grad, ctx.weight) if needs_x else None
        return grad_x, ctx.linear.weight_grad(grad, x, ctx.weight) if needs_weight else None, None


class _SwiGLUExperts(Function):
    """Both projections and the weighted SwiGLU between them as one node: what most models are, at least host time."""

    @staticmethod
    def forward(
        ctx, rows_PD: Tensor, weights_P: Tensor, up: nn.Parameter, down: nn.Parameter, linear: _GroupedLinear
    ) -> Tensor:
        hidden_P2I = linear.product(rows_PD, up)
        activated_PI = activation.forward(hidden_P2I, weights_P)
        ctx.save_for_backward(rows_PD, weights_P, hidden_P2I, activated_PI)
        ctx.up, ctx.down, ctx.linear = up, down, linear
        return linear.product(activated_PI, down)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PD: Tensor):
        rows_PD, weights_P, hidden_P2I, activated_PI = ctx.saved_tensors
        linear: _GroupedLinear = ctx.linear
        needs_rows, _, needs_up, needs_down, _ = ctx.needs_input_grad
        grad_PD = grad_PD.contiguous()
        grad_PI = linear.input_grad(grad_PD, ctx.down)
        grad_P2I, grad_P = activation.backward(grad_PI, hidden_P2I, weights_P)
        grad_down = linear.weight_grad(grad_PD, activated_PI, ctx.down) if needs_down else None
        hand_over(BACKWARD)  # the host reads the other pass's sizes while the GPU has work
        grad_rows = linear.input_grad(grad_P2I, ctx.up) if needs_rows else None
        grad_up = linear.weight_grad(grad_P2I, rows_PD, ctx.up) if needs_up else None
        return grad_rows, grad_P, grad_up, grad_down, None


class _RowBias(Function):
    @staticmethod
    def forward(ctx, bias_LD: Tensor, linear: _GroupedLinear) -> Tensor:
        rows = linear.rows
        ctx.dtype = bias_LD.dtype
        counts_L = torch.diff(rows.offsets_L, prepend=rows.offsets_L.new_zeros(1))
        ctx.save_for_backward(counts_L)
        return bias_LD.repeat_interleave(counts_L, 0, output_size=sum(rows.tokens_per_expert))

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
