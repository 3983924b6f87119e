"""Delayed and fused weight gradients and early buckets under the Trainer: the same bits, at every step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ep import EPOverlapStrategy
from lightning_ep.dispatch.base import exchange_observers
from lightning_ep.gradients import GradientReducer
from lightning_ep.mesh import build_mesh
from tests.distributed import RemoteError, run_distributed
from tests.strategy.toy import Run, assert_replicas_equal, assert_trained_alike, loader, train
from tests.strategy.wgrad_runs import Module, fit
from tests.trained import quiet_trainer

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
DELAY = {**OVERLAP, "delay_wgrad_compute": True}
SIBLING = {"overlap_dispatch_backward_with_experts_wgrad": True}
FUSED = {"gradient_accumulation_fusion": True}
EARLY = {"overlap_grad_reduce": True, "bucket_cap_mb": 0.002}


def assert_same_bits(ranks: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for one, other in zip(ranks, others, strict=True):
        assert torch.equal(one["losses"], other["losses"])
        assert one.get("scale") == other.get("scale")
        assert len(other["waiting"]) > len(other["gradients"]) and not any(other["waiting"])
        for step, (want, got) in enumerate(zip(one["gradients"], other["gradients"], strict=True)):
            assert want.keys() == got.keys(), step
            for name, grad in want.items():
                torch.testing.assert_close(got[name], grad, rtol=0, atol=0, equal_nan=True, msg=f"step {step}, {name}")
        for name, parameter in one["params"].items():
            assert torch.equal(parameter, other["params"][name]), name


# name: (options, the same without what is tested, accumulation, more arguments of `fit`)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, dict[str, Any]]] = {
    "delayed under 1f1b, clipped": (DELAY, {}, 4, {"gradient_clip_val": 0.1}),
    "delayed, nothing to pair": ({**DELAY, "overlap_schedule": "1f1b"}, {}, 1, {}),
    "delayed under two_batch": (DELAY, OVERLAP, 1, {}),
    "small sibling": (SIBLING, {}, 1, {}),
    "small sibling, accumulated": (SIBLING, {}, 4, {}),
    "fused and delayed": ({**DELAY, **FUSED}, FUSED, 4, {}),
    "fused and delayed, bf16": ({**DELAY, **FUSED}, FUSED, 4, {"precision": "bf16-true"}),
    "16-mixed with skipped steps": (DELAY, {}, 2, {"scaler": 2.0**18, "gradient_clip_val": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str) -> None:
    options, base, accumulate, arguments = CASES[case]
    expected = run_distributed(_fit, 2, base, accumulate, arguments)
    assert_same_bits(expected, run_distributed(_fit, 2, options, accumulate, arguments))
    shared = {n for n in expected[0]["gradients"][0] if "moe.0.experts" in n}
    assert len(shared) == 2 and "net.moe.2.experts.down_proj" not in expected[0]["gradients"][0]
    if "scaler" in arguments:  # some steps were skipped, some taken
        assert expected[0]["scale"] < arguments["scaler"]
        finite = [all(g.isfinite().all() for g in step.values()) for step in expected[0]["gradients"]]
        assert True in finite and False in finite


def _fit(options: dict[str, Any], accumulate: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return fit(options, accumulate, **arguments)


@pytest.mark.parametrize("more", [{}, DELAY, {**DELAY, **FUSED}], ids=["plain", "delayed", "delayed, fused"])
def test_early_buckets_change_no_bit(more: dict[str, Any]) -> None:
    base = {k: v for k, v in EARLY.items() if k == "bucket_cap_mb"} | {k: v for k, v in more.items() if k in FUSED}
    expected = run_distributed(_fit, 4, base, 2, {"steps": 4})
    actual = run_distributed(_fit, 4, {**more, **EARLY}, 2, {"steps": 4})
    assert_same_bits(expected, actual)
    for name in actual[0]["digests"]:  # ranks that share experts agree
        assert len({rank["digests"][name] for rank in actual if name in rank["digests"]}) == 1, name


def when_buckets_leave(overlap: bool) -> list[str]:
    """Arrivals of dispatch gradients and starts of expert buckets, over one window of two micro-batches."""
    events: list[str] = []
    all_reduce = dist.all_reduce

    def recorded(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if strategy.mesh is not None and group is strategy.mesh.edp_group:
            events.append("bucket")
        return all_reduce(tensor, op=op, group=group, async_op=async_op)

    module = Module()
    strategy = EPOverlapStrategy(2, bucket_cap_mb=0.002, **DELAY, overlap_grad_reduce=overlap)
    trainer = quiet_trainer(strategy=strategy, accumulate_grad_batches=2, use_distributed_sampler=False)

    def observe(leg: str, layer: int, *times: float) -> None:
        if leg == "dispatch_bwd":
            events.append(f"dispatch_bwd/{layer}")

    exchange_observers.append(observe)
    dist.all_reduce = recorded
    try:
        trainer.fit(module, loader(2, 4, dist.get_rank()))
    finally:
        dist.all_reduce = all_reduce
        exchange_observers.remove(observe)
    return events


def test_expert_buckets_leave_while_their_layers_gradients_travel() -> None:
    """A layer's bucket starts after its dispatch gradient did and before that has arrived; only in the last backward."""
    for events in run_distributed(when_buckets_leave, 4, True):
        assert events[:4] == [f"dispatch_bwd/{layer}" for layer in (3, 2, 1, 0)]
        # One of layer 2's weights is frozen; layers 1 and 0 share theirs, complete with layer 0.
        assert events[4:] == [
            *("bucket", "bucket", "dispatch_bwd/3", "bucket", "dispatch_bwd/2"),
            *("dispatch_bwd/1", "bucket", "bucket", "dispatch_bwd/0"),
        ]
    for events in run_distributed(when_buckets_leave, 4, False):
        assert events[8:] == ["bucket"] * 5


# -- failures


class Planted(RuntimeError):
    pass


def fails(where: str) -> dict[str, Any]:
    """A fit that fails in one pass of a pair, or in the last backward, when some gradients are reduced already."""
    module, strategy = Module(), EPOverlapStrategy(2, **DELAY, **EARLY)
    forward = module.net.moe[1].forward

    def planted(x: Tensor) -> Tensor:
        if where == "forward" and len(module.losses) == 2:
            raise Planted
        out = forward(x)
        if len(module.losses) == {"backward": 2, "last backward": 3}.get(where):
            out.register_hook(_raise)
        return out

    module.net.moe[1].forward = planted
    trainer = quiet_trainer(strategy=strategy, accumulate_grad_batches=4, use_distributed_sampler=False)
    with pytest.raises(Planted):
        trainer.fit(module, loader(4, 2, dist.get_rank()))
    return {"waiting": len(strategy.parallel.queue), "buckets": len(strategy._reducer._under_way)}


def _raise(grad: Tensor) -> None:
    raise Planted


@pytest.mark.parametrize("where", ["forward", "backward", "last backward"])
def test_an_exception_in_either_pass_drops_the_queue_whole(where: str) -> None:
    assert run_distributed(fails, 2, where) == [{"waiting": 0, "buckets": 0}] * 2


class _Leftover(pl.Callback):
    """A weight gradient that nobody computes before the optimizer step."""

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        weight = module.net.moe[2].experts.gate_up_proj
        trainer.strategy.parallel.queue.push(weight, 2, None)


def train_with_a_leftover() -> None:
    fit(SIBLING, 1, steps=1, callbacks=[_Leftover()])


def test_a_leftover_at_the_optimizer_step_is_an_error() -> None:
    with pytest.raises(RemoteError, match=r"weight gradients are not in .grad yet \(waiting: layers \[2\]"):
        run_distributed(train_with_a_leftover, 2)


# -- buckets that not every rank completes


def train_toy(accumulate: int) -> dict[str, Any]:
    run = Run(trainer={"accumulate_grad_batches": accumulate}, options=EARLY)
    return train(run, dist.get_world_size(), 2)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_branches_that_one_rank_takes_keep_the_order_of_buckets(accumulate: int) -> None:
    """Rank 0 completes a bucket in the backward that the others complete with zeros when they reduce."""
    expected = train(Run(trainer={"accumulate_grad_batches": accumulate}), 4, None)
    ranks = run_distributed(train_toy, 4, accumulate)
    assert_trained_alike(ranks, expected)
    assert_replicas_equal(ranks)


def reduce_too_early() -> str:
    weight, mesh = torch.nn.Parameter(torch.ones(3)), build_mesh(1, "cpu")
    reducer = GradientReducer([weight], [], mesh, overlap=True)
    reducer.reopen()
    reducer.start()
    weight.sum().backward()
    with pytest.raises(RuntimeError) as error:
        weight.sum().backward()
    reducer.abort()
    weight.grad = None
    weight.sum().backward()  # not the last of a window: nothing leaves
    reducer.start()
    (2 * weight.sum()).backward()
    reducer.reduce()
    reducer.close()
    assert weight.grad.tolist() == [3, 3, 3] and not weight._post_accumulate_grad_hooks
    return str(error.value)


def test_a_gradient_that_grows_after_it_left_is_an_error() -> None:
    for message in run_distributed(reduce_too_early, 2):
        assert "grew after it was reduced" in message and "overlap_grad_reduce=False" in message
