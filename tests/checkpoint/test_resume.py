"""Saving, loading and resuming through the Trainer, at the same and at other EP and world sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightning_ep.checkpoint import consolidate_checkpoint, load_full_state_dict
from tests.checkpoint.runs import (
    STEPS,
    Scheduled,
    TwoOptimizers,
    failing_loads,
    failure,
    keep_best,
    logits,
    plain_logits,
    remember,
    resave,
    train,
    train_saving_midway,
)
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


def test_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """With a loader that can go on, at the same and at another EP size."""
    straight = run_distributed(train_saving_midway, 2, tmp_path, 2, None, 0)
    for ep_size, tolerance in [(2, 0), (1, 1e-5)]:
        resumed = run_distributed(train_saving_midway, 2, None, ep_size, tmp_path / "step=2.ckpt", 9)
        for before, after in zip(straight, resumed, strict=True):
            torch.testing.assert_close(after["losses"], before["losses"][2:], rtol=tolerance, atol=0)


def test_last_is_found(tmp_path: Path) -> None:
    straight = run_distributed(train, 2, Scheduled, tmp_path / "a", 2, 3, None, {})
    run_distributed(train, 2, Scheduled, tmp_path / "b", 2, 2, None, {})
    resumed = run_distributed(train, 2, Scheduled, tmp_path / "b", 2, 3, "last", {"seed": 9})
    assert resumed[0]["losses"] == straight[0]["losses"][2 * STEPS :]


def test_frozen_parameters(tmp_path: Path) -> None:
    """Frozen experts have no optimizer state, and none appears."""
    arguments = {"freeze": "layers.0.mlp.experts"}
    straight = run_distributed(train, 2, Scheduled, tmp_path / "a", 2, 2, None, arguments)
    resumed = run_distributed(train, 2, Scheduled, None, 2, 2, tmp_path / "a/epoch=0.ckpt", {**arguments, "seed": 9})
    assert_same(resumed[0]["params"], straight[0]["params"])
    saved = everything(tmp_path / "a/epoch=0.ckpt", tmp_path)
    assert len(saved["optimizer_states"][0]["state"]) == len(saved["state_dict"]) - 2


def test_weight_averaging(tmp_path: Path) -> None:
    """Averaged experts are as spread as the trained ones; the checkpoint's weights are the average."""
    straight = run_distributed(train, 2, Scheduled, tmp_path / "a", 2, 2, None, {}, True)
    saved = tmp_path / "a/epoch=0.ckpt"
    resumed = run_distributed(train, 2, Scheduled, None, 2, 2, saved, {"seed": 9}, True)
    assert resumed[0]["losses"] == straight[0]["losses"][STEPS:]
    assert_same(resumed[0]["params"], straight[0]["params"])
    averaged = load_full_state_dict(tmp_path / "a/last.ckpt")
    assert_same({f"model.{n}": p for n, p in straight[0]["params"].items()}, averaged)
    other_size = run_distributed(train, 2, Scheduled, None, 1, 2, saved, {"seed": 9}, True)
    for name, p in other_size[0]["params"].items():
        torch.testing.assert_close(p, straight[0]["params"][name], rtol=1e-4, atol=1e-5)


def test_single_files_both_ways(tmp_path: Path) -> None:
    """Lightning's own checkpoint loads into shards, and a consolidated one into Lightning's own strategies."""
    plain = run_distributed(train, 2, Scheduled, tmp_path / "ddp", None, 2, None, {})
    file = tmp_path / "ddp/epoch=0.ckpt"
    assert file.is_file()
    ours = run_distributed(train, 2, Scheduled, tmp_path / "ep", 2, 2, file, {"seed": 9})
    torch.testing.assert_close(ours[1]["losses"], plain[1]["losses"][STEPS:], rtol=1e-5, atol=0)

    run_distributed(resave, 2, file, tmp_path / "sharded.ckpt", 2)
    expected = torch.load(file, weights_only=True)
    actual = everything(tmp_path / "sharded.ckpt", tmp_path)
    assert_same(actual, {key: expected[key] for key in actual} | {"state_dict": dict(expected["state_dict"])})

    continued = run_distributed(train, 2, Scheduled, None, None, 2, tmp_path / "whole.pt", {"seed": 9})
    assert continued[1]["losses"] == plain[1]["losses"][STEPS:]
    assert_same(Scheduled.load_from_checkpoint(tmp_path / "whole.pt").state_dict(), actual["state_dict"])
    assert_same(load_full_state_dict(file), dict(expected["state_dict"]))


def test_best_ones_are_kept(tmp_path: Path) -> None:
    (names, best), _ = run_distributed(keep_best, 2, tmp_path)
    assert names == ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"] and best.endswith("epoch=1.ckpt")
    assert load_full_state_dict(tmp_path / "last.ckpt").keys() == load_full_state_dict(best).keys()
    for said in run_distributed(failure, 2, train, Scheduled, None, 2, 9, best, {}):
        assert "checkpoint contains only the model" in said


def test_state_that_is_code_is_named(tmp_path: Path) -> None:
    (_, warned), _ = run_distributed(remember, 2, tmp_path, None)
    assert any("callbacks.Remembers.shadow[0] have the shape of this rank's experts" in w for w in warned), warned
    assert any("callbacks.Remembers.code, callbacks.Remembers.nested[0].module" in w for w in warned), warned
    (state, warned), _ = run_distributed(remember, 2, tmp_path, tmp_path / "epoch=0.ckpt")
    assert state["where"] == "/a/b" and state["array"].tolist() == [0, 1, 2] and state["nested"] == [{"count": 3}]
    assert any("was saved without callbacks.Remembers.code" in w for w in warned), warned


def test_every_key_is_accounted_for(tmp_path: Path) -> None:
    run_distributed(train, 2, Scheduled, tmp_path, 2, 1, None, {})
    for extra, two, skip, twice in run_distributed(failing_loads, 2, tmp_path / "epoch=0.ckpt"):
        assert 'Missing key(s) in state_dict: "extra.weight", "extra.bias"' in extra
        assert "the checkpoint has 1 optimizers, the module has 2" in two
        assert re.search("missing in the checkpoint \\[\\], unexpected .*experts", skip)
        assert "experts.gate_up_proj: (8, 48, 32) in the checkpoint, (16, 48, 32) in the model" in twice
