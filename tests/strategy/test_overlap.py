"""The schedules: what they compute, which runs when, what hooks see, and how they end."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ep import EPOverlapStrategy
from lightning_ep.config import EPConfig
from lightning_ep.dispatch.base import exchange_observers
from lightning_ep.experts import gemm
from lightning_ep.experts.interface import find_experts
from lightning_ep.experts.wgrad import WeightGradQueue
from lightning_ep.schedule.overlap import Overlap, choose_schedule
from lightning_ep.schedule.turns import hand_over
from lightning_ep.schedule.two_batch import TwoBatch, find_stack
from tests.distributed import run_distributed
from tests.reference import TINY, rank_loss, tiny_model, tokens
from tests.trained import CausalLM, loader, quiet_trainer, whole

OVERLAP = {"overlap_moe_expert_parallel_comm": True}


# -- 1f1b: bit for bit the plain run


def _train(model_type: str, ep_size: int, options: dict, accumulate: int, steps: int, precision: str) -> dict[str, Any]:
    module = CausalLM(tiny_model(model_type), lr=2e-3)
    strategy = EPOverlapStrategy(ep_size, **options)
    trainer = quiet_trainer(
        strategy=strategy, accumulate_grad_batches=accumulate, gradient_clip_val=1.0, precision=precision,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, loader(steps, accumulate))
    return {"losses": torch.stack(module.losses), "params": whole(strategy, dict(module.model.named_parameters()))}


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("delay", [False, True])
def test_1f1b_is_bit_identical(precision: str, delay: bool) -> None:
    arguments = ("qwen3_moe", 2)
    plain = run_distributed(_train, 2, *arguments, {}, 3, 8, precision)
    overlapped = run_distributed(_train, 2, *arguments, {**OVERLAP, "delay_wgrad_compute": delay}, 3, 8, precision)
    for one, other in zip(plain, overlapped, strict=True):
        assert torch.equal(one["losses"], other["losses"])
        for name, parameter in one["params"].items():
            assert torch.equal(parameter, other["params"][name]), name


def _order() -> list[str]:
    seen: list[str] = []

    def observe(leg: str, layer: int, *times: float) -> None:
        seen.append(f"{leg}/{layer}")

    exchange_observers.append(observe)
    try:
        module = CausalLM(tiny_model("qwen3_moe"))
        strategy = EPOverlapStrategy(2, **OVERLAP)
        trainer = quiet_trainer(
            strategy=strategy, accumulate_grad_batches=2, precision="bf16-true", use_distributed_sampler=False
        )
        trainer.fit(module, loader(1, 2))
    finally:
        exchange_observers.remove(observe)
    return seen


def test_turns_pair_the_backward_with_the_next_forward() -> None:
    """Exchanges by the time they arrive: forward of 0 alone, then backward of 0 beside forward of 1, layer by layer."""
    for order in run_distributed(_order, 2):
        assert order == [
            *("dispatch/0", "combine/0", "dispatch/1", "combine/1"),
            *("combine_bwd/1", "dispatch/0", "dispatch_bwd/1", "combine/0"),
            *("combine_bwd/0", "dispatch/1", "dispatch_bwd/0", "combine/1"),
            *("combine_bwd/1", "dispatch_bwd/1", "combine_bwd/0", "dispatch_bwd/0"),
        ]


# -- multiprocessors: experts leave those of an exchange alone, and only while exchanges run beside them


def _spared(options: dict) -> list[int | None]:
    seen: list[int | None] = []
    os.environ["NCCL_MAX_CTAS"] = "4"
    own, gemm._set_sm_carveout = gemm._set_sm_carveout, seen.append
    try:
        _train("qwen3_moe", 2, options, 2, 1, "bf16-true")
    finally:
        gemm._set_sm_carveout = own
        del os.environ["NCCL_MAX_CTAS"]
    return seen


@pytest.mark.parametrize("options", [OVERLAP, {"overlap_dispatch_backward_with_experts_wgrad": True}, {}])
def test_experts_spare_the_multiprocessors_of_an_exchange(options: dict) -> None:
    for seen in run_distributed(_spared, 2, options):
        if not options:
            assert not seen
        else:  # set for each call alone
            assert len(seen) >= 2 * 3 and seen == [4, None] * (len(seen) // 2)


# -- hooks and windows


class Hooks(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(f"start{args[-1]}")

    def on_before_backward(self, *args: Any) -> None:
        self.seen.append("before")

    def on_after_backward(self, trainer: pl.Trainer, module: CausalLM) -> None:
        assert len(trainer.strategy.parallel.queue) == 0
        assert all(p.grad is not None for p in module.parameters())
        self.seen.append("after")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.seen.append("step")

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(f"end{args[-1]}")


def _hooks(batches: int, accumulate: int, overlap: bool) -> dict[str, Any]:
    class Validated(CausalLM):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            rank_loss(self.model, batch[0])

    module, hooks = Validated(tiny_model("qwen3_moe"), lr=2e-3), Hooks()
    strategy = EPOverlapStrategy(2, overlap_moe_expert_parallel_comm=overlap, delay_wgrad_compute=overlap)
    trainer = quiet_trainer(
        strategy=strategy, accumulate_grad_batches=accumulate, callbacks=[hooks], precision="bf16-true",
        val_check_interval=2, max_epochs=2, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, loader(1, batches), loader(1, 1))
    return {"seen": hooks.seen, "params": list(module.parameters()), "losses": torch.stack(module.losses)}


def test_hooks_keep_their_order_but_for_parked_backwards() -> None:
    """`on_before_backward` and `on_after_backward` of a parked micro-batch come with the next `training_step`."""
    plain, seen = (run_distributed(_hooks, 2, 4, 2, overlap)[0]["seen"] for overlap in (False, True))
    assert plain[:10] == ["start0", "before", "after", "end0", "start1", "before", "after", "step", "end1", "start2"]
    assert seen[:10] == ["start0", "end0", "start1", "before", "after", "before", "after", "step", "end1", "start2"]
    assert sorted(seen) == sorted(plain)


@pytest.mark.parametrize("batches, accumulate", [(5, 2), (4, 3), (3, 4)])
def test_windows_of_any_shape_equal_the_plain_run(batches: int, accumulate: int) -> None:
    """Two epochs that end inside a window, validation inside each epoch and inside windows."""
    runs = [run_distributed(_hooks, 2, batches, accumulate, overlap) for overlap in (False, True)]
    for plain, overlapped in zip(*runs, strict=True):
        assert len(plain["losses"]) == 2 * batches
        assert torch.equal(plain["losses"], overlapped["losses"])
        for one, other in zip(plain["params"], overlapped["params"], strict=True):
            assert torch.equal(one, other)


# -- exceptions


class Planted(RuntimeError):
    pass


def _fails(where: str) -> str:
    class Failing(CausalLM):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if where == "None":
                return None
            if where == "forward" and batch_idx == 1:
                raise Planted("in the forward of micro-batch 1")
            if where == "backward" and batch_idx == 0:
                loss.register_hook(lambda grad: (_ for _ in ()).throw(Planted("in the backward of micro-batch 0")))
            return loss

    module = Failing(tiny_model("qwen3_moe"))
    strategy = EPOverlapStrategy(2, **OVERLAP, delay_wgrad_compute=True)
    trainer = quiet_trainer(
        strategy=strategy, accumulate_grad_batches=3, precision="bf16-true", use_distributed_sampler=False
    )
    try:
        trainer.fit(module, loader(1, 3))
    except RuntimeError as error:
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        assert frames[-1] in ("training_step", "<genexpr>") or not isinstance(error, Planted), frames
        assert len(strategy.parallel.queue) == 0
        assert strategy._overlap is None
        hand_over(0)  # nobody's turn is waited for any more
        dist.barrier()
        return str(error)
    raise AssertionError("the exception was lost")


@pytest.mark.parametrize("where", ["forward", "backward", "None"])
def test_an_exception_reaches_the_user_and_nothing_hangs(where: str) -> None:
    """That includes Lightning's own refusal of a distributed `training_step` that returns None."""
    assert all(where in message for message in run_distributed(_fails, 2, where, timeout=20))


# -- two_batch


@pytest.mark.parametrize("model_type", TINY)
def test_split_stack_computes_the_undivided_batch(model_type: str) -> None:
    """Odd batch; loss with the router's auxiliary loss, and every gradient."""
    whole_model = tiny_model(model_type)
    split = copy.deepcopy(whole_model)
    _, stack = find_stack(split, find_experts(split))
    TwoBatch(stack, on_batch_of_one=lambda: pytest.fail("the batch is 3"))
    ids = tokens(0, 0, 0, batch=3)
    losses = [rank_loss(model, ids) for model in (whole_model, split)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for one, other in zip(whole_model.parameters(), split.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)


def _two_batch_legs(batch: int) -> tuple[list[str], float]:
    seen: list[str] = []

    def observe(leg: str, layer: int, *times: float) -> None:
        seen.append(f"{leg}/{layer}")

    exchange_observers.append(observe)
    module = CausalLM(tiny_model("qwen3_moe"))
    strategy = EPOverlapStrategy(2, **OVERLAP)
    ids = tokens(0, 0, dist.get_rank(), batch=batch)
    try:
        quiet_trainer(strategy=strategy, max_steps=1).fit(module, torch.utils.data.DataLoader([ids], batch_size=1))
    finally:
        exchange_observers.remove(observe)
    return seen, module.losses[0].item()


def test_halves_take_turns_forward_and_backward() -> None:
    for order, _ in run_distributed(_two_batch_legs, 2, 4):
        assert order[:4] == ["dispatch/0", "dispatch/0", "combine/0", "combine/0"]
        assert order[8:12] == ["combine_bwd/1", "combine_bwd/1", "dispatch_bwd/1", "dispatch_bwd/1"]


def test_a_batch_of_one_falls_back() -> None:
    with pytest.warns(UserWarning, match="nothing to overlap: a batch of 1 cannot be split"):
        _warns_in_one_process()


def _warns_in_one_process() -> None:
    model = tiny_model("mixtral")
    experts = find_experts(model)

    parallel = SimpleNamespace(model=model, experts=experts, queue=WeightGradQueue())
    overlap = Overlap(EPConfig(2, overlap_moe_expert_parallel_comm=True), parallel, 1, True)
    rank_loss(model, tokens(0, 0, 0, batch=1))
    overlap.close()
    assert "_two_batch" not in vars(find_stack(model, experts)[1])


def test_named_split_module_must_exist() -> None:
    model = tiny_model("mixtral")
    with pytest.raises(ValueError, match=r"overlap_split_module='model.stack' is no module"):
        find_stack(model, find_experts(model), "model.stack")


# -- which schedule


@pytest.mark.parametrize(
    "schedule, accumulate, automatic, choice",
    [("auto", 1, True, "two_batch"), ("auto", 2, True, "1f1b"), ("auto", 2, False, "two_batch"), ("two_batch", 4, True, "two_batch"),
     ("1f1b", 4, True, "1f1b")],
)  # fmt: skip
def test_choice(schedule: str, accumulate: int, automatic: bool, choice: str) -> None:
    config = EPConfig(2, overlap_moe_expert_parallel_comm=True, overlap_schedule=schedule)  # type: ignore[arg-type]
    assert choose_schedule(config, accumulate, automatic)[0] == choice


def test_1f1b_refuses_manual_optimization() -> None:
    config = EPConfig(2, overlap_moe_expert_parallel_comm=True, overlap_schedule="1f1b")
    with pytest.raises(ValueError, match="automatic_optimization=False; use overlap_schedule='two_batch'"):
        choose_schedule(config, 4, automatic_optimization=False)
