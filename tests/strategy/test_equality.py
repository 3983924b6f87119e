"""The strategy trains as one process would on the concatenated batch: forward, gradients, clipped AdamW steps."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_distributed
from tests.reference import TINY, reference_run, tiny_model
from tests.trained import make_optimizer, train_distributed

STEPS, ACCUMULATE, CLIP, LR = 5, 2, 1.0, 2e-3


def assert_close(actual: dict, expected: dict, rtol: float, what: str) -> None:
    assert actual.keys() == expected.keys(), f"{what}: {actual.keys() ^ expected.keys()}"
    for name, want in expected.items():
        # Relative to the largest entry: an element may be a difference of large terms.
        error = (actual[name] - want).abs().max() / want.abs().max().clamp(min=1e-30)
        assert error <= rtol, f"{what} {name}: relative error {error:.2e}"


@pytest.mark.parametrize("world_size, ep_size", [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("model_type", TINY)
def test_trains_as_one_process(model_type: str, world_size: int, ep_size: int) -> None:
    model = tiny_model(model_type)
    expected = reference_run(
        model, world_size, STEPS, ACCUMULATE, CLIP, make_optimizer("adamw", model.parameters(), LR)
    )
    ranks = run_distributed(
        train_distributed, world_size, model_type, ep_size, STEPS, ACCUMULATE, CLIP, "adamw", LR, {}, timeout=120
    )
    for rank, actual in enumerate(ranks):
        torch.testing.assert_close(
            actual["losses"], [per_rank[rank] for per_rank in expected["losses"]], rtol=1e-5, atol=0
        )
        torch.testing.assert_close(actual["norms"], expected["norms"], rtol=1e-5, atol=0)
        assert_close(actual["grads"], expected["grads"], 1e-5, "first gradient")
        assert_close(actual["params"], expected["params"], 1e-5, "parameter")
