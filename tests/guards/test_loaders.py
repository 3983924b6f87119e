"""Ranks with different numbers of batches: training ends together, evaluation and prediction see everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import RemoteError, run_distributed
from tests.guards import runs
from tests.reference import tokens

LIMIT = 30


def train(world_size: int, kind: str, counts: list[int], val: Any = None, strategy: dict | None = None, **options: Any):
    return run_distributed(runs.train, world_size, kind, counts, val, strategy or {}, options, timeout=LIMIT)


@pytest.mark.parametrize("kind", ["sized", "streamed", "stateful"])
def test_training_ends_with_the_first_rank_that_is_dry(kind: str) -> None:
    for seen, _, _ in train(2, kind, [5, 3], max_epochs=2):
        assert seen["train"] == [0, 1, 2, 0, 1, 2]
    (_, warned, _), (_, quiet, _) = train(2, kind, [5, 3])
    assert len(warned) == 1 and "rank 1" in warned[0] and not quiet, warned


@pytest.mark.parametrize("kind", ["sized", "streamed"])
def test_uneven_training_data_can_be_refused(kind: str) -> None:
    with pytest.raises(RemoteError) as error:
        train(4, kind, [4, 3, 4, 4], strategy={"uneven_data": "error"})
    text = str(error.value)
    assert text.count("UnevenDataError: ") == 4
    expected = "4 on ranks 0, 2-3, 3 on rank 1" if kind == "sized" else "rank 1 had no more than 3 training batches"
    assert text.count(expected) >= 4 and "uneven_data='stop'" in text


@pytest.mark.parametrize("kind", ["sized", "streamed"])
def test_no_training_data_on_one_rank_is_an_error_on_all(kind: str) -> None:
    with pytest.raises(RemoteError) as error:
        train(2, kind, [3, 0])
    assert str(error.value).count("UnevenDataError: ") == 2 and "rank 1" in str(error.value)


def test_even_loaders_are_left_alone() -> None:
    for seen, warned, untouched in train(2, "sized", [3, 3], ("sized", [2, 2])):
        assert untouched and not warned and len(seen["train"]) == 3 and len(seen["val"]) == 2
    for seen, warned, untouched in train(2, "sized", [5, 4], limit_train_batches=2):
        assert untouched and not warned and len(seen["train"]) == 2


def test_the_state_of_a_loader_is_not_ahead() -> None:
    # (Lightning itself takes one batch more than it trains from a loader without length.)
    for seen, _, _ in train(2, "stateful", [6, 6]):
        assert seen["states"][:4] == [2, 3, 4, 5]


def test_validation_inside_training() -> None:
    """A sanity check, then a validation every second batch, with loaders that differ in both loops."""
    ranks = train(
        2, "streamed", [4, 6], ("streamed", [3, 1]), num_sanity_val_steps=2, val_check_interval=2, max_epochs=1
    )
    for rank, (seen, _, _) in enumerate(ranks):
        assert seen["train"] == [0, 1, 2, 3]
        batches = [batch for _, batch, _ in seen["val"]]
        own = [0, 1, 2][: [3, 1][rank]]
        assert batches == own[:2] + own + own


CASES = [
    pytest.param(2, 2, [("sized", [3, 1])], {}, id="sized"),
    pytest.param(2, 2, [("sized", [0, 2])], {}, id="empty"),
    pytest.param(2, 2, [("streamed", [1, 3])], {}, id="streamed"),
    pytest.param(2, 2, [("streamed", [2, 0])], {}, id="streamed empty"),
    pytest.param(4, 2, [("sized", [1, 0, 3, 2])], {}, id="EP2xEDP2"),
    pytest.param(4, 4, [("streamed", [2, 1, 4, 0])], {}, id="EP4"),
    pytest.param(2, 2, [("sized", [2, 3]), ("sized", [3, 0])], {}, id="two loaders"),
    pytest.param(2, 2, [("streamed", [2, 3]), ("sized", [3, 1])], {}, id="streamed and sized"),
    pytest.param(2, 2, [("sized", [5, 1])], {"limit_val_batches": 3, "limit_test_batches": 3}, id="limit"),
    pytest.param(2, 2, [("streamed", [5, 1])], {"limit_val_batches": 3, "limit_test_batches": 3}, id="streamed limit"),
]


@pytest.mark.parametrize("world_size, ep_size, kinds, options", CASES)
def test_evaluation_sees_every_batch(world_size: int, ep_size: int, kinds: list, options: dict) -> None:
    """Each rank gets the losses that one process gets for its batches, however long the others go on."""
    fn = "validate" if world_size == 2 else "test"
    limit = options.get("limit_val_batches", 99)
    ranks = run_distributed(runs.evaluate, world_size, fn, ep_size, kinds, options, timeout=LIMIT)
    for rank, steps in enumerate(ranks):
        assert [step[:2] for step in steps] == [
            (which, batch) for which, (_, counts) in enumerate(kinds) for batch in range(min(counts[rank], limit))
        ]
        for _, batch, loss in steps:
            assert loss == pytest.approx(runs.plain_loss(runs.sample(rank, batch)), rel=1e-4)


def test_combined_loaders_end_with_the_shortest() -> None:
    kinds = [("sized", [4, 3]), ("sized", [2, 4])]
    for steps in run_distributed(runs.evaluate, 2, "validate", 2, kinds, {}, "min_size", timeout=LIMIT):
        assert [batch for _, batch, _ in steps] == [0, 1]


@pytest.mark.parametrize("kind, counts", [("sized", [2, 4]), ("streamed", [3, 1])])
def test_prediction_sees_every_batch(kind: str, counts: list[int]) -> None:
    for rank, logits in enumerate(run_distributed(runs.predict, 2, 2, kind, counts, {}, timeout=LIMIT)):
        assert len(logits) == counts[rank]
        for i, actual in enumerate(logits):
            torch.testing.assert_close(actual, runs.plain_logits(runs.sample(rank, i)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world_size, ep_size, count, batch_size", [(2, 2, 5, 1), (4, 2, 9, 2), (4, 4, 5, 1)])
def test_prediction_with_lightnings_sampler(world_size: int, ep_size: int, count: int, batch_size: int) -> None:
    """Every sample once, in order, though some ranks have a batch less."""
    ranks = run_distributed(runs.predict_sampled, world_size, ep_size, count, batch_size, timeout=LIMIT)
    indices = [[i for batch, _ in outputs for i in batch] for outputs in ranks]
    assert indices == [list(range(rank, count, world_size)) for rank in range(world_size)]
    assert len({len(outputs) for outputs in ranks}) == 2
    for outputs in ranks:
        for batch, logits in outputs:
            ids = torch.cat([tokens(i, 0, 0, batch=1) for i in batch])
            torch.testing.assert_close(logits, runs.plain_logits(ids), rtol=1e-4, atol=1e-4)
