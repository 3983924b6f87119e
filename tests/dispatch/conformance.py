"""What every dispatcher has to do, whatever carries its tokens: one suite, on the CPU and on GPUs.

Experts spread over ranks, with a dispatcher in between, against the same experts whole, in one process, with the tokens
of all ranks: outputs and all gradients, over two steps with different routings and numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ep.config import EPConfig
from lightning_ep.dispatch import Carrier
from lightning_ep.experts.layer import Experts
from lightning_ep.experts.model import ParallelModel
from lightning_ep.mesh import ExpertMesh
from tests.experts.spread import Batch, random_batch, relative_error, run

# What `EPConfig` says for each dispatcher.
OPTIONS = {
    "alltoall": {},
    "alltoall without dedup": {"moe_dispatch_dedup": False},
    "deepep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    "hybridep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
}

# Largest difference over the largest entry. bfloat16 has 8 bits, and tokens, sums and gradients are rounded on the way.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}

NUM_EXPERTS, TOP_K = 8, 3


def any_experts(tokens: int, seed: int, first: int = 0, last: int = NUM_EXPERTS) -> Tensor:
    """Ids in [first, last), all different for each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, last - first, generator=generator).argsort(1)[:, :TOP_K] + first


# name -> ids `[T, K]` of a rank in a step
ROUTINGS: dict[str, Callable[[int, int], Tensor]] = {
    "any experts": lambda rank, step: any_experts(32, 10 * step + rank),
    "one rank receives nothing": lambda rank, step: any_experts(9, 10 * step + rank, 0, NUM_EXPERTS // 2),
    "all tokens to one expert": lambda rank, step: torch.full((5 + rank, TOP_K), NUM_EXPERTS - 1),
    "a rank without own tokens": lambda rank, step: any_experts(0 if rank == step else 7, 10 * step + rank),
    "no tokens anywhere in a step": lambda rank, step: any_experts(11 * step, rank),
    "other numbers of tokens on each rank and step": lambda rank, step: any_experts(
        (1, 700)[(rank + step) % 2] + 3 * rank, 10 * step + rank
    ),
    "an expert twice": lambda rank, step: torch.tensor([[rank, rank, 5], [2, 6, 6], [7, 7, 7]]),
}


def make_experts(hidden: int, inner: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Experts(hidden, inner, NUM_EXPERTS, initializer_range=0.3).to(dtype)


def make_batch(ids: Tensor, hidden: int, seed: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Tokens in `dtype`, weights as the field's routers give them: at least float32."""
    batch = random_batch(ids, hidden, seed, torch.promote_types(dtype, torch.float32))
    x, grad = batch.x_TD.to(dtype), batch.grad_TD.to(dtype)
    return Batch(*(t.to(device) for t in (x, batch.index_TK, batch.weights_TK, grad)))


def errors_of(
    routing: Callable[[int, int], Tensor],
    mesh: ExpertMesh,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
    carrier: Carrier | None = None,
    **options: object,
) -> dict[str, float]:
    """Relative error of each output and gradient of this rank; infinite where one is not finite or of another shape.

    Args:
        routing: `[T, K]` ids for a rank and a step.
        carrier: what carries the tokens, to use it for several routings; one of its own by default.
        options: of `EPConfig`.
    """
    exact = torch.promote_types(dtype, torch.float32)
    whole = make_experts(hidden, inner, dtype).to(device)
    truth = deepcopy(whole).to(exact)
    root = nn.ModuleDict({"experts": deepcopy(whole)})
    parallel = ParallelModel(root, EPConfig(mesh.ep_size, **options), mesh, carrier)
    parallel.shard()
    experts = root["experts"]
    ranks = dist.get_process_group_ranks(mesh.ep_group)
    me, errors = dist.get_rank(), {}
    for step in range(2):
        batches = {r: make_batch(routing(r, step), hidden, 10 * step + r, dtype, device) for r in ranks}
        together = Batch(
            *(torch.cat(parts) for parts in zip(*(vars(b).values() for b in batches.values()), strict=True))
        )
        start = sum(len(batches[r].x_TD) for r in ranks if r < me)
        own = slice(start, start + len(batches[me].x_TD))
        expected = run(
            truth, Batch(together.x_TD.to(exact), together.index_TK, together.weights_TK, together.grad_TD.to(exact))
        )
        for name, got in run(experts, batches[me], parallel).items():
            if got.dtype != (torch.promote_types(dtype, torch.float32) if "weight" in name else dtype):
                errors[f"dtype of {name}, step {step}"] = float("inf")
            errors[f"{name}, step {step}"] = relative_error(got.to(exact), expected[name][own], scale=expected[name])
    for name, parameter in truth.named_parameters():
        got = experts.get_parameter(name).grad
        want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        got = torch.zeros_like(experts.get_parameter(name)) if got is None else got
        share = want[mesh.local_experts(NUM_EXPERTS)]
        errors[f"gradient of {name}"] = relative_error(got.to(exact), share, scale=want)
    if carrier is None:
        parallel.close()
    return errors


def wrong(errors: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Those above the tolerance."""
    return {name: error for name, error in errors.items() if not error <= TOLERANCE[dtype]}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Deterministic algorithms, and NaN in all memory that torch allocates."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
