"""Moving tokens to experts and back: one file a dispatcher, one contract for all (`base.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_ep.config import EPConfig
from lightning_ep.dispatch.alltoall import AllToAllDispatcher, Transport
from lightning_ep.dispatch.base import Dispatcher
from lightning_ep.imports import is_available


def make_dispatcher(
    config: EPConfig, num_experts: int, transport: Transport, layer: int, after_dispatch_grad: Callable[[], None]
) -> Dispatcher:
    """The dispatcher that `config` asks for, for one layer."""
    return AllToAllDispatcher(
        num_experts,
        transport,
        layer,
        dedup=config.moe_dispatch_dedup,
        fused=config.moe_permute_fusion and torch.cuda.is_available() and is_available("triton"),
        after_dispatch_grad=after_dispatch_grad,
    )
