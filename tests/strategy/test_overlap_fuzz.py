"""Random windows, random exceptions in either pass, random skipped steps: never a hang, always the plain run's state."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_ep import EPOverlapStrategy
from tests.distributed import run_distributed
from tests.reference import rank_loss, tiny_model
from tests.trained import CausalLM, loader, quiet_trainer


class Planted(RuntimeError):
    pass


def _raise_planted(grad: Tensor) -> Tensor:
    raise Planted


class Fuzzed(CausalLM):
    """Does at one micro-batch of an episode what the dice say."""

    what, at = "nothing", -1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = rank_loss(self.model, batch[0])
        self.losses.append(loss.detach())
        if batch_idx == self.at:
            if self.what == "forward":
                raise Planted
            if self.what == "backward":
                loss.register_hook(_raise_planted)
            if self.what == "skip":
                loss = loss * float("inf")
        return loss


def _episodes(seed: int, steps: int, overlap: bool) -> dict[str, Any]:
    """`fit` again and again on one model, until `steps` micro-batches were asked for; the dice are the same on all ranks."""
    dice = random.Random(seed)
    module = Fuzzed(tiny_model("qwen3_moe", num_hidden_layers=1), lr=1e-3)
    outcomes, done = [], 0
    while done < steps:
        accumulate, batches = dice.randint(1, 5), dice.randint(1, 9)
        module.what = dice.choice(["nothing", "nothing", "forward", "backward", "skip", "skip"])
        module.at, delay = dice.randrange(batches), dice.random() < 0.5
        module.losses.clear()
        strategy = EPOverlapStrategy(
            2, overlap_moe_expert_parallel_comm=overlap, delay_wgrad_compute=overlap and delay, overlap_schedule="1f1b"
        )
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
        trainer = quiet_trainer(
            strategy=strategy, plugins=[plugin], accumulate_grad_batches=accumulate, use_distributed_sampler=False
        )
        try:
            trainer.fit(module, loader(1, batches))
            outcomes.append((module.what, trainer.global_step, plugin.scaler.get_scale()))
        except Planted:
            outcomes.append((module.what, "raised", trainer.global_step))
        assert len(strategy.parallel.queue) == 0
        done += batches
    return {"outcomes": outcomes, "params": [p.detach().clone() for p in module.parameters()]}


def _compare(steps: int, timeout: float) -> None:
    plain, overlapped = (run_distributed(_episodes, 2, 7, steps, overlap, timeout=timeout) for overlap in (False, True))
    for one, other in zip(plain, overlapped, strict=True):
        assert one["outcomes"] == other["outcomes"]
        assert {what for what, *_ in one["outcomes"]} == {"nothing", "forward", "backward", "skip"}
        for a, b in zip(one["params"], other["params"], strict=True):
            assert torch.equal(a, b)


def test_fuzz() -> None:
    _compare(steps=80, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_fuzz_2000_steps() -> None:
    _compare(steps=2000, timeout=1100)
