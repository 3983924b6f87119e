"""Routings that made other projects wait forever or train wrongly: right gradients, nobody waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_ep.experts.layer import Experts
from tests.distributed import run_distributed
from tests.experts.hf_classes import tiny_experts
from tests.experts.own import OwnExperts
from tests.experts.spread import compare, make_mesh, random_batch, worst

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 16, 24, 8, 3


def any_experts(tokens: int, rank: int, first: int = 0, last: int = NUM_EXPERTS) -> Tensor:
    """Ids in [first, last), different for each token while there are enough."""
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(tokens, last - first, generator=generator).argsort(1)[:, :TOP_K] + first


# name -> ids of a rank
ROUTINGS: dict[str, Callable[[int], Tensor]] = {
    "all tokens to one expert": lambda rank: torch.full((5 + rank, TOP_K), NUM_EXPERTS - 1),
    "all tokens to one rank's experts": lambda rank: any_experts(6, rank, 0, 4),
    "last experts never chosen": lambda rank: any_experts(7, rank, 0, NUM_EXPERTS - 3),
    "a rank without tokens": lambda rank: any_experts(0 if rank == 0 else 9, rank),
    "a rank without tokens, and nobody calls it": lambda rank: any_experts(9 if rank == 0 else 0, rank, 0, 4),
    "0, 1, 7 and 4096 tokens": lambda rank: any_experts((0, 1, 7, 4096)[rank % 4], rank),
    "no tokens anywhere": lambda rank: any_experts(0, rank),
    "the same expert twice": lambda rank: torch.randint(0, 2, (6, TOP_K), generator=torch.Generator().manual_seed(rank)),
}  # fmt: skip

KINDS = ("grouped", "biased", "own")
OPTIONS = [{}, {"moe_dispatch_dedup": False}, {"delay_wgrad_compute": True}]


def make_experts(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "grouped":
        return Experts(HIDDEN, INNER, NUM_EXPERTS, initializer_range=0.5)
    return tiny_experts("gpt_oss", "GptOssExperts") if kind == "biased" else OwnExperts(HIDDEN, INNER, NUM_EXPERTS)


def errors_of(world_size: int, ep_size: int, dtype: torch.dtype, poison: bool) -> dict[tuple, dict[str, float]]:
    """For each kind of experts, routing and set of options the errors of two steps."""
    mesh = make_mesh(ep_size)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(poison)
    try:
        return {
            (kind, name, tuple(options)): compare(
                make_experts(kind).to(dtype),
                [random_batch(routing(rank), HIDDEN, rank, dtype) for rank in range(world_size)],
                mesh,
                steps=2,
                **options,
            )
            for kind in KINDS
            for name, routing in ROUTINGS.items()
            for options in OPTIONS
        }
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "world_size, ep_size, dtype, poison",
    [(2, 2, torch.float32, False), (4, 4, torch.float64, False), (4, 2, torch.float32, True)],
    ids=["2 ranks", "4 ranks float64", "two groups, fresh memory full of NaN"],
)
def test_outputs_and_gradients_over_two_steps(world_size: int, ep_size: int, dtype: torch.dtype, poison: bool) -> None:
    ranks = run_distributed(errors_of, world_size, world_size, ep_size, dtype, poison, timeout=60)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    wrong = {}
    for case in ranks[0]:
        errors = worst([rank[case] for rank in ranks])
        wrong.update({(*case, name): error for name, error in errors.items() if not error < tolerance})
    assert wrong == {}
