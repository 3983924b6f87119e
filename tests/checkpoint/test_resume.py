"""Saving, loading and resuming through the Trainer, at the same and at other EP and world sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_ep.checkpoint import consolidate_checkpoint, load_full_state_dict
from tests.checkpoint.runs import STEPS, Scheduled, TwoOptimizers, logits, plain_logits, resave, train
from tests.distributed import run_distributed


def assert_same(actual, expected, where: str = "") -> None:
    """Bit for bit."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), where
    else:
        assert actual == expected, where


@pytest.mark.parametrize("kind", [Scheduled, TwoOptimizers])
@pytest.mark.parametrize("world_size, ep_size", [(2, 2), (4, 2)])
def test_resume_equals_never_having_stopped(tmp_path: Path, kind, world_size: int, ep_size: int) -> None:
    straight = run_distributed(train, world_size, kind, tmp_path / "a", ep_size, 2, None, {})
    resumed = run_distributed(
        train, world_size, kind, tmp_path / "b", ep_size, 2, tmp_path / "a/epoch=0.ckpt", {"seed": 9}
    )
    for before, after in zip(straight, resumed, strict=True):
        assert after["losses"] == before["losses"][STEPS:]
        assert after["lr"] == before["lr"]
        assert_same(after["params"], before["params"])


def everything(checkpoint: Path, tmp_path: Path) -> dict:
    """Model, optimizer and schedule, whole."""
    consolidate_checkpoint(checkpoint, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    return {key: whole[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}


def test_other_sizes(tmp_path: Path) -> None:
    """4 -> 2 -> 1 -> 4 on other worlds: weights, logits and optimizer states stay the same, bit for bit."""
    run_distributed(train, 4, Scheduled, tmp_path / "4", 4, 1, None, {})
    first = tmp_path / "4/epoch=0.ckpt"
    expected, expected_logits = everything(first, tmp_path), plain_logits(load_full_state_dict(first))
    logits_at_4 = run_distributed(logits, 4, first, 4)
    assert len(expected["optimizer_states"][0]["state"]) == len(expected["state_dict"])
    previous = first
    for world_size, ep_size in [(4, 2), (2, 1), (2, 2), (1, 1), (4, 4)]:
        target = tmp_path / f"{world_size}-{ep_size}.ckpt"
        run_distributed(resave, world_size, previous, target, ep_size)
        assert_same(everything(target, tmp_path), expected)
        assert_same(plain_logits(load_full_state_dict(target)), expected_logits)
        for actual in run_distributed(logits, world_size, target, ep_size):
            torch.testing.assert_close(actual, expected_logits, rtol=1e-4, atol=1e-5)
        previous = target
    assert_same(run_distributed(logits, 4, previous, 4), logits_at_4)
