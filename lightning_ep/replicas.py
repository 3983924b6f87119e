"""What has to stay the same on all ranks beside gradients, and what would let it drift in silence."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_BROADCAST_BYTES = 250 * 2**20

# DDP's arguments that change what is trained and have no meaning without its reducer.
_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
_NOT_HERE = ("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce")
_NOT_YOURS = ("self", "module", "device_ids", "output_device", "dim", "process_group", "device_mesh")


class ReplicatedBuffers:
    """Buffers (running statistics of a BatchNorm) become rank 0's, as under DDP, but once an optimizer step.

    Args:
        ignored: full names of buffers that are each rank's own.
    """

    def __init__(self, model: nn.Module, ignored: Collection[str]) -> None:
        names = {name for name, _ in model.named_buffers()} - set(ignored)
        self._slots = [
            (module._buffers, key)
            for prefix, module in model.named_modules()
            for key in module._buffers
            if (f"{prefix}.{key}" if prefix else key) in names
        ]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Collective over the world."""
        buffers = [slot[key] for slot, key in self._slots if slot[key] is not None]
        if buffers and dist.get_world_size() > 1:
            dist._broadcast_coalesced(dist.group.WORLD, buffers, _BROADCAST_BYTES, 0)


def check_ddp_arguments(strategy: DDPStrategy) -> None:
    """Refuse keywords that `DistributedDataParallel` does not know, and those that would have no effect here.

    Raises:
        TypeError: an unknown name, with the nearest known one.
        ValueError: a known name that changes what DDP trains and means nothing without its reducer.
    """
    given: dict[str, Any] = strategy._ddp_kwargs
    parameters = signature(DistributedDataParallel.__init__).parameters
    known = [name for name in parameters if name not in _NOT_YOURS]
    for name, value in given.items():
        # LightningCLI passes every argument that it finds in DDP's signature, with its default.
        if name not in known and not (name in parameters and value == parameters[name].default):
            near = get_close_matches(name, [*known, *signature(type(strategy).__init__).parameters], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{type(strategy).__name__} got an unexpected keyword argument {name!r}{hint}")
    refused = [name for name in _NOT_HERE if given.get(name) is not None]
    refused += [name for name in _HOOKS if getattr(strategy, f"_{name}") is not None]
    if refused:
        raise ValueError(
            f"{', '.join(refused)}: belongs to DDP's reducer, which {type(strategy).__name__} replaces by one that knows "
            "experts, and would have no effect; leave it out"
        )


def check_gradients(model: nn.Module) -> None:
    """Refuse layers whose gradients cannot be reduced. Raises ValueError naming the first."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{name!r} has sparse gradients, which EPOverlapStrategy does not reduce over ranks; set sparse=False"
            )


def check_optimizers(optimizers: Iterable[Optimizer], model: nn.Module) -> None:
    """Refuse optimizers under which replicas would drift apart in silence.

    Raises:
        ValueError: one whose step depends on inner products over all parameters, of which a rank has only its experts;
            one with parameters that the model does not own, so that nobody reduces their gradients.
    """
    owned = set(model.parameters())
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"{name} takes inner products over all parameters, and each rank has other experts: ranks would take "
                "different steps. Use an optimizer that treats each parameter on its own, such as AdamW."
            )
        foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in owned]
        if foreign:
            raise ValueError(
                f"{name} has {len(foreign)} parameters that are not the LightningModule's, first of shape "
                f"{tuple(foreign[0].shape)}: nobody would reduce their gradients over ranks. Make their owner an attribute "
                "of the LightningModule; create the optimizer in configure_optimizers if the model was on the meta device."
            )
