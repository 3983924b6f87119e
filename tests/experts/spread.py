"""An experts module spread over ranks, against itself whole, in the same process, with the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ep.config import EPConfig
from lightning_ep.experts.model import ParallelModel
from lightning_ep.mesh import ExpertMesh, build_mesh


@dataclass(frozen=True)
class Batch:
    """What one rank gives to its experts, and the gradient that comes back for their output."""

    x_TD: Tensor
    index_TK: Tensor
    weights_TK: Tensor
    grad_TD: Tensor


def random_batch(index_TK: Tensor, hidden: int, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, len(index_TK), hidden, generator=generator, dtype=dtype)
    return Batch(x, index_TK, torch.rand(index_TK.shape, generator=generator, dtype=dtype), grad)


def make_mesh(ep_size: int, seconds: float = 20) -> ExpertMesh:
    """Groups in which nobody waits for long."""
    return build_mesh(ep_size, "cpu", timedelta(seconds=seconds))


def spread(whole: nn.Module, mesh: ExpertMesh, **options: Any) -> tuple[nn.Module, ParallelModel]:
    """A copy of the experts module, cut to this rank's share."""
    root = nn.ModuleDict({"experts": deepcopy(whole)})
    parallel = ParallelModel(root, EPConfig(expert_model_parallel_size=mesh.ep_size, **options), mesh)
    parallel.shard()
    return root["experts"], parallel


def run(
    experts: nn.Module, batch: Batch, parallel: ParallelModel | None = None, mixed: bool = False
) -> dict[str, Tensor]:
    """One forward (in bfloat16 autocast if `mixed`) and backward; weight gradients add up on the module."""
    x, weights = batch.x_TD.clone().requires_grad_(), batch.weights_TK.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        out = experts(x, batch.index_TK, weights)
    if parallel is not None:
        out.backward(batch.grad_TD)
        parallel.queue.flush()
    elif len(x):  # whole experts that follow their tokens have no graph without any
        out.backward(batch.grad_TD)
    grads = {"input gradient": x, "routing weight gradient": weights}
    return {"output": out.detach(), **{name: t.grad if len(x) else torch.zeros_like(t) for name, t in grads.items()}}


def compare(
    whole: nn.Module, batches: Sequence[Batch], mesh: ExpertMesh, steps: int = 1, mixed: bool = False, **options: Any
) -> dict[str, float]:
    """Relative error of each quantity of this rank after `steps` forwards and backwards whose gradients add up.

    A parameter without gradient counts as one with zeros, as in `GradientReducer`.

    Args:
        batches: one for each rank of the world.
        mixed: forwards under autocast, as the Trainer's bf16-mixed.
        options: of `EPConfig`.
    """
    ranks = dist.get_process_group_ranks(mesh.ep_group)
    together = Batch(*(torch.cat(parts) for parts in zip(*(vars(batches[r]).values() for r in ranks), strict=True)))
    start = sum(len(batches[r].x_TD) for r in ranks if r < dist.get_rank())
    mine = batches[dist.get_rank()]
    own = slice(start, start + len(mine.x_TD))
    experts, parallel = spread(whole, mesh, **options)
    whole.zero_grad()
    for _ in range(steps):
        expected, actual = run(whole, together, mixed=mixed), run(experts, mine, parallel, mixed)
    errors = {name: relative_error(actual[name], want[own], scale=want) for name, want in expected.items()}
    local = dict(experts.named_parameters())
    sharded = parallel.experts[0].sharded
    for name, parameter in whole.named_parameters():
        got, want = (torch.zeros_like(p) if p.grad is None else p.grad for p in (local[name], parameter))
        if name in sharded:
            errors[f"gradient of {name}"] = relative_error(got, want[mesh.local_experts(len(want))], scale=want)
        else:  # replicated: the gradient is the sum over ranks
            dist.all_reduce(got, group=mesh.ep_group)
            errors[f"gradient of {name}"] = relative_error(got, want, scale=want)
    return errors


def relative_error(actual: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Largest difference over the largest entry of `scale`; infinite where shape or dtype differ or it is not finite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype or not actual.isfinite().all():
        return float("inf")
    if not actual.numel():
        return 0.0
    return ((actual - expected).abs().max() / scale.abs().max().clamp(min=1e-30)).item()


def worst(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest error of any rank; all report the same quantities."""
    assert all(rank.keys() == ranks[0].keys() for rank in ranks)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}
