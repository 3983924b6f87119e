"""Gradients across ranks: reduction, the true global norm, fp16's found-inf.

The loss is the mean over ranks. A dense parameter's gradient is the mean over the world. An expert's gradient already
holds what every rank of its EP group sent to it, so its sum over the ranks that hold the same expert (EDP) is the sum
over the world, and it is divided by the world's size too, not by the group's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ep.mesh import ExpertMesh


@dataclass(eq=False)
class _Bucket:
    """Gradients that travel in one all-reduce."""

    parameters: list[nn.Parameter]
    group: ProcessGroup | None
    dtype: torch.dtype
    unfinished: set[nn.Parameter]
    grads: list[Tensor] = field(default_factory=list)  # from the launch on
    flat: Tensor | None = None
    work: dist.Work | None = None

    @property
    def launched(self) -> bool:
        return bool(self.grads)

    def launch(self, world_size: int) -> None:
        self.grads = [_gradient(p, self.dtype) for p in self.parameters]
        # Dividing first keeps half-precision sums from overflowing, as DDP does.
        torch._foreach_div_(self.grads, world_size)
        if self.group is not None:
            self.flat = torch.cat([g.reshape(-1) for g in self.grads]) if len(self.grads) > 1 else self.grads[0]
            self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> None:
        if self.work is not None and self.flat is not None:
            self.work.wait()
            if len(self.grads) > 1:
                pieces = self.flat.split([g.numel() for g in self.grads])
                views = [piece.view_as(g) for piece, g in zip(pieces, self.grads, strict=True)]
                torch._foreach_copy_(self.grads, views)


class GradientReducer:
    """Reduces every trainable parameter's gradient, in the same order on all ranks.

    Args:
        dense: parameters replicated over the world.
        experts: parameters replicated over the EDP group.
        bucket_cap_mb: size of one all-reduce in MiB (DDP's name and default of 25).
        float32: parameters of half precision whose gradients add up in float32; reduced so, then rounded.
        overlap: start a bucket as soon as the backward after `start` has completed its gradients. Same numbers.

    A parameter without gradient on this rank takes part with zeros (an expert without tokens, a branch not taken). One
    without gradient on every rank keeps none, so that optimizers pass over it as they would in one process.
    """

    def __init__(
        self,
        dense: Iterable[nn.Parameter],
        experts: Iterable[nn.Parameter],
        mesh: ExpertMesh,
        bucket_cap_mb: float = 25,
        float32: Collection[Tensor] = (),
        overlap: bool = False,
    ) -> None:
        self.world_size = mesh.world_size
        self._cap_bytes = int(bucket_cap_mb * 2**20)
        world = dist.group.WORLD if mesh.world_size > 1 else None
        experts = list(experts)
        self._experts, self._ep_size = frozenset(experts), mesh.ep_size
        self._owned = [(p, world) for p in dense] + [
            (p, mesh.edp_group if mesh.edp_size > 1 else None) for p in experts
        ]
        self._float32, self._overlap, self._device = frozenset(float32), overlap, mesh_device(mesh)
        # Those whose gradient holds something that is not reduced.
        self._open: set[nn.Parameter] = set()
        # Of a backward that reduces as it goes: its buckets, each parameter's, and those of a group still to launch.
        self._under_way: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._next: dict[ProcessGroup | None, deque[_Bucket]] = {}
        hooked = [p for p, _ in self._owned if p.requires_grad] if overlap else []
        self._hooks = [p.register_post_accumulate_grad_hook(self._completed) for p in hooked]

    def start(self) -> None:
        """The backward that comes now is the last before `reduce`."""
        if self._overlap:
            self._under_way = self._make_buckets()
            self._bucket_of = {p: bucket for bucket in self._under_way for p in bucket.parameters}
            self._next = {}
            for bucket in self._under_way:
                self._next.setdefault(bucket.group, deque()).append(bucket)

    def abort(self) -> None:
        """That backward failed: its gradients are lost."""
        self._under_way, self._bucket_of = [], {}

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def reduce(self) -> None:
        """Complete the reduction of all gradients. Callbacks may freeze and unfreeze parameters between calls."""
        buckets = self._under_way or self._make_buckets()
        self.abort()
        parameters = [p for bucket in buckets for p in bucket.parameters]
        used = [p.grad is not None for p in parameters]
        for bucket in buckets:
            if not bucket.launched:
                bucket.launch(self.world_size)
        # After all buckets: on every rank the same work of a group comes in the same order, started early or not.
        anywhere = self._agree_on_used(used)
        for bucket in buckets:
            bucket.wait()
        if not all(used):  # the host reads only on a rank that lacks something
            used = anywhere.tolist()
        grads = [grad for bucket in buckets for grad in bucket.grads]
        for parameter, grad, taken in zip(parameters, grads, used, strict=True):
            parameter.grad = grad.to(parameter.dtype) if taken else None
        self._open.clear()

    @torch.no_grad()
    def reopen(self) -> None:
        """A backward comes, on top of gradients that may be reduced: the next `reduce` sums and divides them once more.

        That leaves a mean over the world as it is, but not an expert's sum over its EDP group. What is frozen now gets
        nothing and stays as it is; what is frozen between here and `reduce` is reduced all the same.
        """
        for p, _ in self._owned:
            if p.requires_grad and p not in self._open:
                self._open.add(p)
                if p in self._experts and p.grad is not None:
                    p.grad.mul_(self._ep_size)

    @torch.no_grad()
    def _completed(self, parameter: nn.Parameter) -> None:
        """A backward has added to this parameter's gradient."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        if bucket.launched:
            raise RuntimeError(
                f"the gradient of a parameter {tuple(parameter.shape)} grew after it was reduced: this model's backward "
                "adds to it more than once (reentrant checkpointing does); set overlap_grad_reduce=False"
            )
        bucket.unfinished.discard(parameter)
        # In order within a group, so that all ranks reduce the same buckets together.
        waiting = self._next[bucket.group]
        while waiting and not waiting[0].unfinished:
            waiting.popleft().launch(self.world_size)

    def _make_buckets(self) -> list[_Bucket]:
        """Parameters of one group and gradient dtype, up to the cap together; in the order in which a backward should
        complete them, which is the reverse of the model's."""
        buckets: list[_Bucket] = []
        filling: dict[tuple, tuple[list[nn.Parameter], int]] = {}

        def close(key: tuple) -> None:
            parameters, _ = filling.pop(key)
            buckets.append(_Bucket(parameters, *key, set(parameters)))

        for p, group in reversed(self._owned):
            if p not in self._open:
                continue
            key = group, torch.float32 if p in self._float32 else p.dtype
            nbytes = p.numel() * key[1].itemsize
            if key in filling and filling[key][1] + nbytes > self._cap_bytes:
                close(key)
            parameters, filled = filling.setdefault(key, ([], 0))
            parameters.append(p)
            filling[key] = parameters, filled + nbytes
        for key in list(filling):
            close(key)
        return buckets

    def _agree_on_used(self, used: list[bool]) -> Tensor:
        """For each parameter 1 where any rank has a gradient. Every rank asks, since any rank may lack one."""
        anywhere = torch.tensor(used, dtype=torch.float32, device=self._device)
        if self.world_size > 1:
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        return anywhere


def _gradient(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=dtype)
    return parameter.grad.to(dtype).contiguous()


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
    same: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        same.setdefault(grad.dtype, []).append(grad)
    norms = [
        norm.real.to(device)
        for dtype, of_dtype in same.items()
        for norm in torch._foreach_norm(of_dtype, norm_type, dtype=torch.promote_types(dtype, torch.float32))
    ]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


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
