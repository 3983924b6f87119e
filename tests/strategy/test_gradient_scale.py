"""Gradients that come out larger or smaller than one process's: Adam hides it, plain gradient descent does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.strategy.toy import Run, ToyModule, train


class Descent(ToyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def gradients(ep_size: int | None, accumulate: int) -> dict[str, Any]:
    run = Run(Descent(), {"accumulate_grad_batches": accumulate}, steps=accumulate)
    before = {name: p.detach().clone() for name, p in run.module.named_parameters()}
    result = train(run, 4, ep_size)
    # What one step of plain descent did to a parameter is its gradient.
    return {name: before[name] - after for name, after in result["params"].items()}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_every_class_of_parameters_moves_as_far_as_in_one_process(ep_size: int, accumulate: int) -> None:
    expected = gradients(None, accumulate)
    for actual in run_distributed(gradients, 4, ep_size, accumulate):
        ratios = {name: (actual[name].norm() / want.norm()).item() for name, want in expected.items() if want.any()}
        assert {"experts", "router", "first"} <= {part for name in ratios for part in name.split(".")}
        assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 1e-4} == {}
