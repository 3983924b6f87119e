"""Gradients across ranks: reduction, the true global norm, fp16's found-inf.

The loss is the mean over ranks. A dense parameter's gradient is the mean over the world. An expert's gradient already
holds what every rank of its EP group sent to it, so its sum over the ranks that hold the same expert (EDP) is the sum
over the world, and it is divided by the world's size too, not by the group's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ep.mesh import ExpertMesh


class GradientReducer:
    """Reduces every trainable parameter's gradient, all at once, in the same order on all ranks.

    Args:
        dense: parameters replicated over the world.
        experts: parameters replicated over the EDP group.
        bucket_cap_mb: size of one all-reduce in MiB (DDP's name and default of 25).

    A parameter without gradient on this rank takes part with zeros (an expert without tokens, a branch not taken). One
    without gradient on every rank keeps none, so that optimizers pass over it as they would in one process.
    """

    def __init__(
        self, dense: Iterable[nn.Parameter], experts: Iterable[nn.Parameter], mesh: ExpertMesh, bucket_cap_mb: float = 25
    ) -> None:
        self.world_size = mesh.world_size
        self._cap_bytes = int(bucket_cap_mb * 2**20)
        world = dist.group.WORLD if mesh.world_size > 1 else None
        self._owned = [(p, world) for p in dense] + [
            (p, mesh.edp_group if mesh.edp_size > 1 else None) for p in experts
        ]
        self._device = mesh_device(mesh)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all gradients in place. Callbacks may freeze and unfreeze parameters between calls."""
        owned = [(p, group) for p, group in self._owned if p.requires_grad]
        missing = [p for p, _ in owned if p.grad is None]
        used = self._agree_on_used([p for p, _ in owned])
        for p in missing:
            p.grad = torch.zeros_like(p)
        works = []
        for parameters, group in _buckets(owned, self._cap_bytes):
            grads = [_contiguous_grad(p) for p in parameters]
            # Dividing first keeps half-precision sums from overflowing, as DDP does.
            torch._foreach_div_(grads, self.world_size)
            if group is not None:
                flat = torch.cat([g.reshape(-1) for g in grads]) if len(grads) > 1 else grads[0]
                works.append((dist.all_reduce(flat, group=group, async_op=True), flat, grads))
        for work, flat, grads in works:
            work.wait()
            if len(grads) > 1:
                pieces = flat.split([g.numel() for g in grads])
                torch._foreach_copy_(grads, [piece.view_as(g) for piece, g in zip(pieces, grads, strict=True)])
        if missing:  # the host reads only on a rank that lacks something
            for (p, _), anywhere in zip(owned, used.tolist(), strict=True):
                if not anywhere:
                    p.grad = None

    def _agree_on_used(self, parameters: list[nn.Parameter]) -> Tensor:
        """For each parameter 1 where any rank has a gradient. Every rank asks, since any rank may lack one."""
        used = torch.tensor([float(p.grad is not None) for p in parameters], device=self._device)
        if self.world_size > 1:
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
        return used


def _buckets(
    owned: list[tuple[nn.Parameter, ProcessGroup | None]], cap_bytes: int
) -> Iterator[tuple[list[nn.Parameter], ProcessGroup | None]]:
    """Parameters of one group and dtype, up to `cap_bytes` together."""
    same: dict[tuple, list[nn.Parameter]] = {}
    for p, group in owned:
        same.setdefault((group, p.dtype), []).append(p)
    for (group, _), parameters in same.items():
        filling, filled = [], 0
        for p in parameters:
            if filling and filled + p.nbytes > cap_bytes:
                yield filling, group
                filling, filled = [], 0
            filling.append(p)
            filled += p.nbytes
        yield filling, group


def _contiguous_grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    if not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad


@torch.no_grad()
def global_grad_norm(
    parameters: Iterable[nn.Parameter], experts: set[Tensor], mesh: ExpertMesh, norm_type: float = 2.0
) -> Tensor:
    """Norm of all gradients as one process would see it, each expert counted once. Collective over the EP group.

    Args:
        parameters: those to include, for example one optimizer's; the same names on every rank.
        experts: which of them are experts.
        norm_type: 2, another p, or inf.
    """
    groups: dict[bool, list[Tensor]] = {False: [], True: []}
    device = mesh_device(mesh)
    for p in parameters:
        if p.grad is not None:
            groups[p in experts].append(p.grad)
    dense, local = (_norm(grads, norm_type, device) for grads in (groups[False], groups[True]))
    if norm_type == float("inf"):
        dist.all_reduce(local, op=dist.ReduceOp.MAX, group=mesh.ep_group)
        return torch.maximum(dense, local)
    local = local.pow(norm_type)
    dist.all_reduce(local, group=mesh.ep_group)
    return (dense.pow(norm_type) + local).pow(1 / norm_type)


def _norm(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(grads, norm_type, dtype=torch.promote_types(grads[0].dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type)


def mesh_device(mesh: ExpertMesh) -> torch.device:
    """The device on which this mesh's backend communicates."""
    kind = mesh.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


class AgreeingGradScaler(torch.amp.GradScaler):
    """A GradScaler whose ranks skip a step together: an inf in one rank's expert is everybody's.

    Stock scalers decide alone, so scales drift apart and replicas with them. Works for fused optimizers too, which
    ask for found-inf inside their step.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        super().__init__(
            device=scaler._device,
            init_scale=scaler._init_scale,
            growth_factor=scaler._growth_factor,
            backoff_factor=scaler._backoff_factor,
            growth_interval=scaler._growth_interval,
            enabled=scaler._enabled,
        )
        self._collective_device = device

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        per_device = super()._unscale_grads_(optimizer, *args)
        # A rank without any gradient still takes part.
        found = per_device or {self._collective_device: torch.zeros(1, device=self._collective_device)}
        for found_inf in found.values():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return found
