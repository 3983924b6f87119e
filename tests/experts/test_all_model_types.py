"""Every experts class of transformers, spread over ranks, against its own eager forward in one process."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ep.config import EPConfig
from lightning_ep.experts.model import ParallelModel
from lightning_ep.mesh import ExpertMesh, build_mesh
from tests.distributed import run_distributed
from tests.experts.hf_classes import HIDDEN, NUM_EXPERTS, experts_classes, tiny_experts

CLASSES = experts_classes()
WORLD, EP_SIZES, TOP_K = 4, (2, 4), 3
TOKENS = (6, 0, 9, 1)  # of each rank


def test_all_classes_are_found() -> None:
    assert len(CLASSES) == 68
    assert len({model_type for model_type, _ in CLASSES}) == 67


@pytest.fixture(scope="module")
def errors() -> dict[tuple[str, str, int], dict[str, float]]:
    """The largest relative error of any rank, by class, EP size and quantity."""
    worst: dict[tuple[str, str, int], dict[str, float]] = {}
    for rank in run_distributed(compare_all, WORLD, timeout=240):
        for key, quantities in rank.items():
            known = worst.setdefault(key, {})
            known.update({name: max(error, known.get(name, 0.0)) for name, error in quantities.items()})
    return worst


@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("model_type, class_name", CLASSES)
def test_spread_experts_equal_the_class_itself(errors: dict, model_type: str, class_name: str, ep_size: int) -> None:
    quantities = errors[model_type, class_name, ep_size]
    assert {"output", "input gradient", "routing weight gradient"} < quantities.keys()
    assert {name: error for name, error in quantities.items() if not error < 1e-5} == {}


def compare_all() -> dict[tuple[str, str, int], dict[str, float]]:
    meshes = [build_mesh(ep_size, "cpu") for ep_size in EP_SIZES]
    found = {}
    for seed, (model_type, class_name) in enumerate(CLASSES):
        torch.manual_seed(seed)
        whole = tiny_experts(model_type, class_name)
        for mesh in meshes:
            found[model_type, class_name, mesh.ep_size] = dict(compare(whole, mesh))
    for mesh in meshes:
        mesh.destroy()
    return found


def compare(whole: nn.Module, mesh: ExpertMesh) -> Iterator[tuple[str, float]]:
    """(quantity, relative error) of this rank's share, from the same tokens of the EP group in one process."""
    ranks = dist.get_process_group_ranks(mesh.ep_group)
    x_TD, index_TK, weights_TK, grad_TD = (torch.cat(parts) for parts in zip(*map(batch, ranks), strict=True))
    own = slice(sum(TOKENS[r] for r in ranks if r < dist.get_rank()), None)
    own = slice(own.start, own.start + TOKENS[dist.get_rank()])
    spread = nn.ModuleDict({"experts": deepcopy(whole)})
    ParallelModel(spread, EPConfig(expert_model_parallel_size=mesh.ep_size), mesh).shard()

    def run(experts: nn.Module, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        x, weights = x_TD[part].clone().requires_grad_(), weights_TK[part].clone().requires_grad_()
        experts.zero_grad()
        out = experts(x, index_TK[part], weights)
        out.backward(grad_TD[part])
        return out.detach(), x.grad, weights.grad

    expected, actual = run(whole, slice(None)), run(spread["experts"], own)
    for name, want, got in zip(("output", "input gradient", "routing weight gradient"), expected, actual, strict=True):
        yield name, relative_error(got, want[own], scale=want)
    share = mesh.local_experts(NUM_EXPERTS)
    parameters = dict(spread["experts"].named_parameters())
    for name, parameter in whole.named_parameters():
        got, want = parameters[name].grad, parameter.grad
        if name.count("."):  # one of a submodule is replicated: its gradient is the sum over ranks
            dist.all_reduce(got, group=mesh.ep_group)
        else:
            want = want[share]
        yield f"gradient of {name}", relative_error(got, want, scale=parameter.grad)


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, experts, routing weights and the output's gradient; ids may repeat and the last ranks' never come.

    A model that skips an expert repeats id 0 with weight 0.
    """
    generator = torch.Generator().manual_seed(rank)
    tokens = TOKENS[rank]
    x, grad = torch.randn(2, tokens, HIDDEN, generator=generator)
    index = torch.randint(0, NUM_EXPERTS // 2, (tokens, TOP_K), generator=generator)
    return x, index, torch.rand(tokens, TOP_K, generator=generator), grad


def relative_error(actual: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Largest difference over the largest entry of `scale`; infinite where shape or dtype differ or it is not finite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype or not actual.isfinite().all():
        return float("inf")
    if not actual.numel():
        return 0.0
    return ((actual - expected).abs().max() / scale.abs().max()).item()
