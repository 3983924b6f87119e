"""Every precision of the Trainer, against one process in the same precision; fp16's skipped steps agreed by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.distributed import run_distributed
from tests.strategy.toy import Batch, Run, Toy, ToyModule, adamw, assert_replicas_equal, train

TOLERANCE = {"32-true": 1e-5, "64-true": 1e-11, "bf16-mixed": 3e-2, "bf16-true": 3e-2, "16-mixed": 3e-3}
DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}


class Descent(ToyModule):
    """Adam would make a full step of a rounding error's sign."""

    def loss(self, batch: Batch) -> torch.Tensor:
        dtype = self.net.first.weight.dtype
        return super().loss(Batch(batch.x.to(dtype), batch.y.to(dtype), batch.sometimes))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def plugins(precision: str) -> dict[str, Any]:
    if precision == "16-mixed":  # Lightning makes bf16 of it on a CPU, unless the plugin is given
        return {"plugins": [fp16(scale=1024.0)]}
    return {"precision": precision}


def fp16(scale: float, growth_interval: int = 1000) -> MixedPrecision:
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    )


def in_precision(precision: str, ep_size: int | None) -> dict[str, Any]:
    run = Run(Descent(), {**plugins(precision), "gradient_clip_val": 1.0, "accumulate_grad_batches": 2})
    result = train(run, 2, ep_size)
    result["dtypes"] = {p.dtype for p in run.module.parameters()}
    return result


@pytest.mark.parametrize("precision", TOLERANCE)
def test_trains_as_one_process_in_the_same_precision(precision: str) -> None:
    expected = in_precision(precision, None)
    ranks = run_distributed(in_precision, 2, precision, 2)
    assert_replicas_equal(ranks)
    for rank, actual in enumerate(ranks):
        assert actual["dtypes"] == {DTYPES.get(precision, torch.float32)}
        rtol = TOLERANCE[precision]
        torch.testing.assert_close(actual["losses"][:, 0], expected["losses"][:, rank], rtol=rtol, atol=0)
        for name, want in expected["params"].items():
            assert (actual["params"][name] - want).abs().max() <= rtol * want.abs().max(), name


# -- fp16: an infinity in one rank's expert

STEPS, BAD_STEP = 6, 2


class Overflowing(ToyModule):
    """At one step a gradient of rank 1's first expert is infinite after the reduction, so on that rank alone."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.scales: list[float] = []
        self.moved: list[bool] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = [p.detach().clone() for p in self.parameters()]

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step == BAD_STEP:
            self.net.moe[0].experts.down_proj.grad[0, 0, 0] = float("inf")

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        self.moved.append(any(not torch.equal(a, b) for a, b in zip(self.before, self.parameters(), strict=True)))

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters(), fused=self.fused)


def overflow(fused: bool) -> dict[str, Any]:
    module = Overflowing(fused)
    run = Run(module, {"plugins": [fp16(scale=256.0)]}, steps=STEPS)
    return {**train(run, dist.get_world_size(), 2), "scales": module.scales, "moved": module.moved}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_the_step_or_none_does(fused: bool, world_size: int) -> None:
    ranks = run_distributed(overflow, world_size, fused)
    assert_replicas_equal(ranks)
    for rank in ranks:
        assert rank["scales"] == [256.0] * BAD_STEP + [128.0] * (STEPS - BAD_STEP)
        assert rank["moved"] == [step != BAD_STEP for step in range(STEPS)]


def scales_of_two_fits() -> list[float]:
    plugin = fp16(scale=64.0, growth_interval=2)
    run = Run(ToyModule(), {"plugins": [plugin]}, steps=4)
    train(run, 2, 2)
    first = plugin.scaler.get_scale()
    train(run, 2, 2)
    return [first, plugin.scaler.get_scale()]


def test_a_second_fit_goes_on_with_the_scale_it_found() -> None:
    assert run_distributed(scales_of_two_fits, 2) == [[256.0, 1024.0]] * 2


# -- float32 routers and other mixtures of dtypes in one model


def mixed_dtypes(ep_size: int | None) -> dict[str, Any]:
    net = Toy().bfloat16()
    for layer in net.moe:
        layer.router.float()
    module = Mixed(net)
    return train(Run(module, {"gradient_clip_val": 0.5}, steps=3), 2, ep_size)


class Mixed(Descent):
    def loss(self, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(batch).float()


def test_clipping_and_reduction_of_parameters_of_two_dtypes() -> None:
    expected = mixed_dtypes(None)
    for actual in run_distributed(mixed_dtypes, 2, 2):
        for name, want in expected["params"].items():
            assert actual["params"][name].dtype == (torch.float32 if "router" in name else torch.bfloat16)
            assert (actual["params"][name] - want).abs().max() <= 3e-2 * want.abs().max(), name
