"""Spreading an experts module over the EP group: its parameters are cut, its forward replaced, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ep.dispatch.alltoall import RoutingError
from lightning_ep.dispatch.base import Dispatcher, combine, dispatch
from lightning_ep.dispatch.ranges import annotate
from lightning_ep.experts.finite import FiniteCheck
from lightning_ep.experts.gemm import Gemm
from lightning_ep.experts.grouped import grouped_experts
from lightning_ep.experts.interface import ExpertsLayout, FoundExperts
from lightning_ep.experts.wgrad import WeightGradQueue
from lightning_ep.mesh import ExpertMesh

# Called with (layer, tokens [T, D], expert ids [T, K], weights [T, K]) before every exchange of a forward.
forward_observers: list[Callable[[int, Tensor, Tensor, Tensor], None]] = []


@dataclass
class ExpertParallel:
    """What an experts module needs to run spread over ranks; lives on it as `module._expert_parallel`.

    Deep copies of the model (weight averaging) share it: it holds no parameter.
    """

    layer: int
    num_experts: int
    mesh: ExpertMesh
    layout: ExpertsLayout | None
    own_forward: Any
    dispatcher: Dispatcher
    gemm: Callable[[], Gemm]  # asked in every forward
    queue: WeightGradQueue
    finite: FiniteCheck
    force_load_balancing: bool = False
    _balanced: dict[tuple, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict) -> ExpertParallel:
        return self

    def balanced(self, experts_TK: Tensor) -> Tensor:
        """Ids of the same shape that load every expert equally: random distinct experts a token, fixed by a seed."""
        key = (*experts_TK.shape, experts_TK.device)
        if key not in self._balanced:
            self._balanced[key] = balanced_routing(*experts_TK.shape, self.num_experts).to(experts_TK.device)
        return self._balanced[key]


def shard_experts(found: FoundExperts, mesh: ExpertMesh) -> None:
    """Cut the expert parameters (and buffers) to this rank's share, in place: optimizers that hold them stay valid.

    Raises ValueError when the experts do not divide by the EP size.
    """
    if found.num_experts % mesh.ep_size:
        raise ValueError(
            f"experts module {found.name!r} has {found.num_experts} experts, which expert_model_parallel_size="
            f"{mesh.ep_size} does not divide; choose a divisor of {found.num_experts}"
        )
    share = mesh.local_experts(found.num_experts)
    num_local = found.num_experts // mesh.ep_size
    for name in found.sharded:
        tensor = getattr(found.module, name)
        if tensor.shape[0] == found.num_experts:
            # clone, so that the memory of the other ranks' experts is freed
            tensor.data = tensor.data[share].clone()
        elif tensor.shape[0] != num_local:  # tied weights come by twice, a second fit finds them cut
            raise ValueError(
                f"experts module {found.name!r} was cut to {tensor.shape[0]} of {found.num_experts} experts before, but "
                f"expert_model_parallel_size={mesh.ep_size} needs {num_local}; build the model again to change the size"
            )
    found.module._ep_num_experts, found.module._ep_sharded = found.num_experts, found.sharded
    if hasattr(found.module, "num_experts"):
        found.module.num_experts = num_local


def install(found: FoundExperts, ep: ExpertParallel) -> None:
    """Replace the module's forward by the expert-parallel one. The bound method follows deep copies of the module."""
    object.__setattr__(found.module, "_expert_parallel", ep)
    found.module.forward = MethodType(expert_parallel_forward, found.module)


def expert_parallel_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts(hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K]) -> [T, D]` over the EP group."""
    ep: ExpertParallel = module._expert_parallel
    if top_k_index.is_floating_point():
        raise ValueError(f"MoE layer {ep.layer}: expert ids are {top_k_index.dtype}; the router has to give integers")
    experts_TK = ep.balanced(top_k_index) if ep.force_load_balancing else top_k_index.long()
    if torch.is_grad_enabled():  # NaN in padding would spoil a backward, and no evaluation
        experts_TK = ep.dispatcher.moves.without_nonfinite(experts_TK, top_k_weights.detach())
    x_TD = hidden_states.to(compute_dtype(hidden_states)).contiguous()
    for observe in forward_observers:
        observe(ep.layer, x_TD, experts_TK, top_k_weights)
    exchange = ep.dispatcher.route(experts_TK)
    try:
        rows = dispatch(exchange, x_TD, top_k_weights)
    except RoutingError as error:
        cause = ep.finite.cause(ep.layer)
        raise RoutingError(f"{error} Seen here: {cause}." if cause else str(error)) from None
    with annotate("ep/experts", ep.layer):
        if ep.layout is not None:
            out_PD = grouped_experts(module, ep.layout, rows, ep.gemm(), ep.layer, ep.queue)
        else:
            out_PD = _own_forward(module, ep, rows)
    out_TD = combine(exchange, out_PD.to(x_TD.dtype))
    if torch.is_grad_enabled():
        ep.finite.note(ep.layer, out_TD)
    return out_TD.to(hidden_states.dtype)


def serve_experts(
    module: nn.Module, hidden: int, slots: int, dtype: torch.dtype, weights_dtype: torch.dtype, device: torch.device
) -> None:
    """Take part in the other ranks' exchange for this layer's experts, without own tokens.

    Args:
        hidden, slots, dtype, weights_dtype: hidden size, top-k and dtypes of the others' tokens and weights.
    """
    expert_parallel_forward(
        module,
        torch.empty(0, hidden, dtype=dtype, device=device),
        torch.empty(0, slots, dtype=torch.int64, device=device),
        torch.empty(0, slots, dtype=weights_dtype, device=device),
    )


def _own_forward(module: nn.Module, ep: ExpertParallel, rows) -> Tensor:
    """A module of its own layout sees every pair as a token that chose one (local) expert."""
    counts = torch.diff(rows.offsets_L, prepend=rows.offsets_L.new_zeros(1))
    local = torch.arange(counts.shape[0], device=counts.device)
    index_P1 = local.repeat_interleave(counts, output_size=sum(rows.tokens_per_expert))[:, None]
    ones_P1 = torch.ones_like(rows.weights_P)[:, None]
    out_PD = ep.own_forward(module, rows.rows_PD, index_P1, ones_P1.to(rows.rows_PD.dtype))
    out_PD = (out_PD * rows.weights_P[:, None]).to(out_PD.dtype)
    # A loop over the experts that were hit leaves no graph without tokens, but the backward's exchange takes all ranks.
    if torch.is_grad_enabled() and not out_PD.requires_grad and any(p.requires_grad for p in module.parameters()):
        out_PD.requires_grad_()
    return out_PD


def compute_dtype(x: Tensor) -> torch.dtype:
    """Under autocast the tokens travel in its dtype, as a linear layer would compute in it."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def balanced_routing(tokens: int, top_k: int, num_experts: int) -> Tensor:
    """`[T, K]` int64 distinct ids a token; over every E / K tokens each expert is chosen once (K must divide E for
    perfect balance). Random, so that tokens meet as many different ranks as under a trained router."""
    generator = torch.Generator().manual_seed(0)
    block = num_experts // top_k
    rounds = -(-tokens // block)
    order = torch.rand(rounds, num_experts, generator=generator).argsort(1)[:, : block * top_k]
    return order.reshape(rounds * block, top_k)[:tokens]
