"""Moving tokens to experts and back: one file a dispatcher, one contract for all (`base.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_ep.config import EPConfig
from lightning_ep.dispatch.alltoall import AllToAllDispatcher, GroupTransport, Transport
from lightning_ep.dispatch.base import Dispatcher
from lightning_ep.dispatch.deepep import DeepEPDispatcher, DeepEPGroup
from lightning_ep.dispatch.hybridep import HybridEPDispatcher, HybridEPGroup
from lightning_ep.imports import is_available
from lightning_ep.mesh import ExpertMesh

# What carries the tokens of all layers of a model; closed when training ends.
Carrier = Transport | DeepEPGroup | HybridEPGroup


def make_carrier(config: EPConfig, mesh: ExpertMesh) -> Carrier:
    """What `config` wants the EP group's tokens carried by; alltoall where there is nobody to exchange them with.

    Raises:
        LibraryError: the flex backend's library is missing or cannot be used.
        ValueError: the backend cannot connect this group.
    """
    backend = config.moe_flex_dispatcher_backend if config.moe_token_dispatcher_type == "flex" else None
    device = torch.device(mesh.device_mesh.device_type)
    if backend == "deepep" and mesh.ep_size > 1:
        return DeepEPGroup(mesh.ep_group, device, config.moe_deepep_num_sms)
    if backend == "hybridep" and mesh.ep_size > 1:
        return HybridEPGroup(mesh.ep_group, device, config.moe_hybridep_num_sms)
    return GroupTransport(mesh.ep_group)


def make_dispatcher(
    config: EPConfig, num_experts: int, carrier: Carrier, layer: int, after_dispatch_grad: Callable[[], None]
) -> Dispatcher:
    """The dispatcher over `carrier`, for one layer."""
    fused = config.moe_permute_fusion and torch.cuda.is_available() and is_available("triton")
    if isinstance(carrier, DeepEPGroup):
        return DeepEPDispatcher(num_experts, carrier, layer, fused, after_dispatch_grad)
    if isinstance(carrier, HybridEPGroup):
        return HybridEPDispatcher(num_experts, carrier, layer, fused, after_dispatch_grad)
    return AllToAllDispatcher(num_experts, carrier, layer, config.moe_dispatch_dedup, fused, after_dispatch_grad)
