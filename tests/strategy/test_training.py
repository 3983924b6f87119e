"""What a Trainer, its callbacks and a LightningModule may do, each trained as one process would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.strategy.runs import OVERLAP, RUNS
from tests.strategy.toy import assert_replicas_equal, assert_trained_alike, train


def run_named(name: str, ep_size: int, overlap: bool) -> dict[str, Any]:
    run = RUNS[name]()
    if overlap:
        run.options["overlap_grad_reduce"] = True
    if overlap and run.trainer.get("accumulate_grad_batches", 1) > 1:
        run.options |= OVERLAP
    return train(run, torch.distributed.get_world_size(), ep_size)


def test_a_world_of_one_rank() -> None:
    (alone,) = run_distributed(run_named, 1, "clipping_by_norm", 1, False)
    assert_trained_alike([alone], train(RUNS["clipping_by_norm"](), 1, None))


@pytest.mark.parametrize("world_size, ep_size, overlap", [(2, 2, False), (4, 2, True)], ids=["EP2", "EP2 x EDP2"])
@pytest.mark.parametrize("name", RUNS)
def test_trains_as_one_process(name: str, world_size: int, ep_size: int, overlap: bool) -> None:
    expected = train(RUNS[name](), world_size, None)
    ranks = run_distributed(run_named, world_size, name, ep_size, overlap)
    assert_trained_alike(ranks, expected)
    assert_replicas_equal(ranks)
    torch.testing.assert_close(ranks[0]["seen"], expected["seen"], rtol=1e-4, atol=1e-6)
