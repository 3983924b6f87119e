"""Every experts class of transformers, spread over ranks, against its own eager forward in one process."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_distributed
from tests.experts.hf_classes import HIDDEN, NUM_EXPERTS, experts_classes, tiny_experts
from tests.experts.spread import compare, make_mesh, random_batch, worst

CLASSES = experts_classes()
EP_SIZES = (2, 4)
TOP_K = 3
TOKENS = (6, 0, 9, 1)  # of each rank


def test_all_classes_are_found() -> None:
    assert len(CLASSES) == 68
    assert len({model_type for model_type, _ in CLASSES}) == 67


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """By rank: the errors of all classes at all EP sizes."""
    return run_distributed(compare_all, len(TOKENS), timeout=240)


@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("model_type, class_name", CLASSES)
def test_spread_experts_equal_the_class_itself(ranks: list, model_type: str, class_name: str, ep_size: int) -> None:
    errors = worst([rank[model_type, class_name, ep_size] for rank in ranks])
    assert {"output", "input gradient", "routing weight gradient", "gradient of down_proj"} < errors.keys()
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


def compare_all() -> dict[tuple[str, str, int], dict[str, float]]:
    meshes = [make_mesh(ep_size, seconds=120) for ep_size in EP_SIZES]
    # Ids may repeat (a model that skips an expert repeats one, with weight 0), and the last ranks' experts never come.
    routings = [
        torch.randint(0, NUM_EXPERTS // 2, (tokens, TOP_K), generator=torch.Generator().manual_seed(rank))
        for rank, tokens in enumerate(TOKENS)
    ]
    batches = [random_batch(routing, HIDDEN, seed=rank) for rank, routing in enumerate(routings)]
    errors = {}
    for seed, (model_type, class_name) in enumerate(CLASSES):
        torch.manual_seed(seed)
        whole = tiny_experts(model_type, class_name)
        for mesh in meshes:
            errors[model_type, class_name, mesh.ep_size] = compare(whole, batches, mesh)
    return errors
