"""The metrics alone, and over two ranks."""

import math

import pytest
import torch
from torch import tensor

from lightning_ep.callbacks.metrics import ExpertLoad, OverlapFraction
from tests.distributed import run_distributed


def test_overlap_fraction_is_of_the_sums():
    metric = OverlapFraction()
    assert metric.compute().isnan(), "no communication is not 'nothing hidden'"
    metric.update(1.0, 10.0)
    metric.update(tensor(8.0), tensor(10.0))
    assert metric.compute() == pytest.approx(0.45)
    metric.reset()
    metric.update(1.0, 4.0)
    assert metric.compute() == 0.25


def test_expert_load_by_hand():
    metric = ExpertLoad(num_experts=4, num_layers=2)
    metric.update(tensor([[0, 1], [0, 2], [0, -1]]), layer=0)
    metric.update(tensor([[0, 1, 2, 3]]), layer=1)
    assert metric.tokens.tolist() == [[3, 1, 1, 0], [1, 1, 1, 1]]
    load = metric.compute()
    assert load["max_over_mean"].tolist() == pytest.approx([3 / (5 / 4), 1.0])
    assert load["dead"].tolist() == [1, 0]
    entropy = -(0.6 * math.log(0.6) + 2 * 0.2 * math.log(0.2)) / math.log(4)
    assert load["entropy"].tolist() == pytest.approx([entropy, 1.0])


def test_expert_load_of_one_expert_only():
    metric = ExpertLoad(num_experts=3)
    metric.update(torch.ones(5, 2, dtype=torch.int64))
    load = metric.compute()
    assert (load["max_over_mean"].item(), load["entropy"].item(), load["dead"].item()) == (3.0, 0.0, 2)


def test_expert_load_refuses_no_experts():
    with pytest.raises(ValueError, match="num_experts=0"):
        ExpertLoad(0)


def _on_rank() -> tuple[float, float, int]:
    rank = torch.distributed.get_rank()
    overlap, load = OverlapFraction(), ExpertLoad(num_experts=2)
    overlap.update(hidden=float(rank), comm=2.0)
    load.update(tensor([rank, rank, 0]))
    return overlap.compute().item(), load.compute()["max_over_mean"].item(), load.compute()["dead"].item()


def test_state_is_summed_over_ranks():
    assert run_distributed(_on_rank, 2) == [(0.25, pytest.approx(4 / 3), 0)] * 2
