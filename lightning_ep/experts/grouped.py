"""Experts as grouped GEMMs, with the input gradient and the weight gradient apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from lightning_ep.dispatch.base import ExpertRows, hand_over_in_backward
from lightning_ep.experts import activation
from lightning_ep.experts.gemm import Gemm, Split
from lightning_ep.experts.interface import ExpertsLayout
from lightning_ep.experts.wgrad import WeightGradQueue
from lightning_ep.schedule.turns import BACKWARD, hand_over


def grouped_experts(
    module: nn.Module,
    layout: ExpertsLayout,
    rows: ExpertRows,
    gemm: Gemm,
    layer: int = 0,
    queue: WeightGradQueue | None = None,
) -> Tensor:
    """The experts' outputs times their routing weights, `[P, D]`.

    Args:
        module: the experts module with its local parameters.
        rows: `rows_PD` in the dtype to compute in.
        gemm: the backend.
        queue: what takes weight gradients over; None leaves them to autograd.
    """
    if gemm.row_multiple > 1:
        padded, place_P = _pad(rows, gemm.row_multiple)
        return _grouped_experts(module, layout, padded, gemm, layer, queue).index_select(0, place_P)
    return _grouped_experts(module, layout, rows, gemm, layer, queue)


def _grouped_experts(
    module: nn.Module,
    layout: ExpertsLayout,
    rows: ExpertRows,
    gemm: Gemm,
    layer: int,
    queue: WeightGradQueue | None,
) -> Tensor:
    split = Split(rows.offsets_L, rows.tokens_per_expert)
    up = _linear(getattr(module, layout.up), split, gemm, layer, queue, layout.is_transposed)
    down = _linear(module.down_proj, split, gemm, layer, queue, layout.is_transposed)
    # The down projection is linear, so the weight may go in front of it, where rows are shorter and memory is saved.
    weight_first = not layout.has_bias and not layout.has_post_expert_norm
    if weight_first and _is_plain_swiglu(module, layout):
        return _SwiGLUExperts.apply(rows.rows_PD, rows.weights_P, up.link, down.link, up, down)
    hidden = _Linear.apply(rows.rows_PD, up.link, up)
    if layout.has_bias:
        hidden = hidden + _RowBias.apply(getattr(module, f"{layout.up}_bias"), split)
    hidden = hand_over_in_backward(hidden)
    activated = module._apply_gate(hidden) if layout.has_gate else module.act_fn(hidden)
    if weight_first:
        return _Linear.apply(_weighted(activated, rows.weights_P), down.link, down)
    out = _Linear.apply(activated, down.link, down)
    if layout.has_bias:
        out = out + _RowBias.apply(module.down_proj_bias, split)
    if layout.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return _weighted(out, rows.weights_P)


def _pad(rows: ExpertRows, multiple: int) -> tuple[ExpertRows, Tensor]:
    """Rows of zeros behind each expert's own, up to the next multiple, and where the own ones are then."""
    padded = [-(-count // multiple) * multiple for count in rows.tokens_per_expert]
    offsets_L = rows.offsets_L
    counts_L = torch.diff(offsets_L, prepend=offsets_L.new_zeros(1))
    padded_offsets_L = ((counts_L + multiple - 1) // multiple * multiple).cumsum(0, dtype=torch.int32)
    # An expert's rows move by the padding of those before it.
    shift_L = (padded_offsets_L - offsets_L).roll(1).index_fill(0, offsets_L.new_zeros(1, dtype=torch.int64), 0)
    own_rows = sum(rows.tokens_per_expert)
    place_P = torch.arange(own_rows, device=offsets_L.device) + shift_L.repeat_interleave(
        counts_L, output_size=own_rows
    )
    rows_PD = rows.rows_PD.new_zeros(sum(padded), rows.rows_PD.shape[1]).index_copy(0, place_P, rows.rows_PD)
    weights_P = rows.weights_P.new_zeros(sum(padded)).index_copy(0, place_P, rows.weights_P)
    return ExpertRows(rows_PD, weights_P, padded_offsets_L, padded), place_P


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
    """`x [P, in] -> [P, out]`, each expert's rows times its own weight `[L, out, in]` (or transposed), and its gradients.

    `link`: what stands for the weight in the graph, itself or, when the queue takes its gradient over, the ticket.
    """

    weight: nn.Parameter
    link: Tensor
    split: Split
    gemm: Gemm
    layer: int
    queue: WeightGradQueue | None
    transposed: bool

    def product(self, x: Tensor) -> Tensor:
        return self.gemm.product(x, self.weight.detach().to(x.dtype), self.split, self.transposed)

    def input_grad(self, grad: Tensor) -> Tensor:
        return self.gemm.input_grad(grad, self.weight.detach().to(grad.dtype), self.split, self.transposed)

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of `link`."""
        contribution = _WeightGrad(self.gemm, grad.contiguous(), x.contiguous(), self.split, self.transposed)
        if self.link is self.weight:
            return contribution.compute().to(self.weight.dtype)
        assert self.queue is not None
        self.queue.push(self.weight, self.layer, contribution)
        return self.link.detach()


def _linear(
    weight: nn.Parameter, split: Split, gemm: Gemm, layer: int, queue: WeightGradQueue | None, transposed: bool
) -> _GroupedLinear:
    queue = queue if queue is not None and queue.takes(weight) else None
    link = weight if queue is None else queue.ticket(weight)
    return _GroupedLinear(weight, link, split, gemm, layer, queue, transposed)


@dataclass(frozen=True)
class _WeightGrad:
    """Keeps nothing alive but the rows that it multiplies."""

    gemm: Gemm
    grad: Tensor
    x: Tensor
    split: Split
    transposed: bool

    def compute(self) -> Tensor:
        return self.gemm.weight_grad(self.grad, self.x, self.split, self.transposed)

    def add_to(self, buffer: Tensor) -> None:
        self.gemm.add_weight_grad(buffer, self.grad, self.x, self.split, self.transposed)


class _Linear(Function):
    @staticmethod
    def forward(ctx, x: Tensor, link: Tensor, linear: _GroupedLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear = linear
        return linear.product(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        linear: _GroupedLinear = ctx.linear
        grad = grad.contiguous()
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = linear.input_grad(grad) if needs_x else None
        return grad_x, linear.weight_grad(grad, x) if needs_weight else None, None


class _SwiGLUExperts(Function):
    """Both projections and the weighted SwiGLU between them as one node: what most models are, at least host time."""

    @staticmethod
    def forward(
        ctx,
        rows_PD: Tensor,
        weights_P: Tensor,
        up_link: Tensor,
        down_link: Tensor,
        up: _GroupedLinear,
        down: _GroupedLinear,
    ) -> Tensor:
        hidden_P2I = up.product(rows_PD)
        activated_PI = activation.forward(hidden_P2I, weights_P)
        ctx.save_for_backward(rows_PD, weights_P, hidden_P2I, activated_PI)
        ctx.up, ctx.down = up, down
        return down.product(activated_PI)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PD: Tensor):
        rows_PD, weights_P, hidden_P2I, activated_PI = ctx.saved_tensors
        up: _GroupedLinear = ctx.up
        down: _GroupedLinear = ctx.down
        needs_rows, _, needs_up, needs_down, *_ = ctx.needs_input_grad
        grad_PD = grad_PD.contiguous()
        grad_PI = down.input_grad(grad_PD)
        grad_P2I, grad_P = activation.backward(grad_PI, hidden_P2I, weights_P)
        grad_down = down.weight_grad(grad_PD, activated_PI) if needs_down else None
        hand_over(BACKWARD)  # the host reads the other pass's sizes while the GPU has work
        grad_rows = up.input_grad(grad_P2I) if needs_rows else None
        grad_up = up.weight_grad(grad_P2I, rows_PD) if needs_up else None
        return grad_rows, grad_P, grad_up, grad_down, None, None


class _RowBias(Function):
    @staticmethod
    def forward(ctx, bias_LD: Tensor, split: Split) -> Tensor:
        ctx.dtype = bias_LD.dtype
        counts_L = torch.diff(split.offsets_L, prepend=split.offsets_L.new_zeros(1))
        ctx.save_for_backward(counts_L)
        return bias_LD.repeat_interleave(counts_L, 0, output_size=sum(split.counts))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PD: Tensor):
        (counts_L,) = ctx.saved_tensors
        rows = grad_PD.to(torch.promote_types(grad_PD.dtype, torch.float32))
        # unsafe: the lengths add up by construction; checking them would make the host wait
        grad_LD = torch.segment_reduce(rows, "sum", lengths=counts_L.long(), axis=0, unsafe=True, initial=0)
        return grad_LD.to(ctx.dtype), None
