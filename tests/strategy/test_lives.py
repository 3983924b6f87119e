"""A module's whole life: loops one after the other, failures in between, built late or on the meta device."""

from __future__ import annotations

import gc
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy
from tests.distributed import run_distributed
from tests.reference import tiny_model
from tests.reference import tokens as make_tokens
from tests.strategy.toy import (
    HIDDEN,
    Batch,
    Run,
    Toy,
    ToyModule,
    assert_replicas_equal,
    assert_trained_alike,
    digests,
    loader,
    make_moe,
    make_trainer,
    train,
)
from tests.trained import quiet_trainer, whole

OVERLAP = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True, "overlap_schedule": "1f1b"}


def parameters(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    if isinstance(trainer.strategy, EPOverlapStrategy):
        return whole(trainer.strategy, named, prefix="")
    return {name: p.detach().clone() for name, p in named.items()}


# -- one loop after the other


class FailsOnce(ToyModule):
    """Its fourth batch cannot be trained the first time."""

    failed = False

    def training_step(self, batches: list[Batch], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batches, batch_idx)
        if batch_idx == 3 and not self.failed:
            self.failed = True
            raise ArithmeticError("the fourth batch")
        return loss


def live(world_size: int, ep_size: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Validate, fit until it fails, fit, fit on, validate, test, predict; the same module throughout."""
    module = FailsOnce()
    trainer = make_trainer(ep_size, options, accumulate_grad_batches=2, max_epochs=1, gradient_clip_val=0.5)
    rank = dist.get_rank() if ep_size else None
    training, held_out = loader(6, world_size, rank), loader(2, world_size, rank, first=100)
    found: dict[str, Any] = {"before": trainer.validate(module, held_out, verbose=False)[0]["val_loss"]}
    with pytest.raises(ArithmeticError, match="the fourth batch"):
        trainer.fit(module, training, held_out)
    module.losses.clear()
    again = make_trainer(ep_size, options, accumulate_grad_batches=2)
    again.fit(module, training, held_out)
    again.fit_loop.max_epochs = 2
    again.fit(module, training, held_out)
    found["logged"] = again.callback_metrics["val_loss"].item()
    found["validated"] = again.validate(module, held_out, verbose=False)[0]["val_loss"]
    found["tested"] = again.test(module, held_out, verbose=False)[0]["test_loss"]
    found["predicted"] = torch.stack(again.predict(module, held_out))
    return {**found, "losses": torch.stack(module.losses), "params": parameters(again, module)}


@pytest.mark.parametrize("options", [{}, OVERLAP], ids=["plain", "overlapped"])
def test_fits_failures_validation_test_and_prediction_in_turn(options: dict[str, Any]) -> None:
    expected = live(2, None, {})
    ranks = run_distributed(live, 2, 2, 2, options)
    assert_trained_alike(ranks, expected, rtol=5e-5)  # AdamW makes rounding larger; by CPU, 1e-5 and more
    for rank, actual in enumerate(ranks):
        for name in ("before", "logged", "validated", "tested"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-5), name
        torch.testing.assert_close(actual["predicted"][:, 0], expected["predicted"][:, rank], rtol=1e-4, atol=1e-5)
    assert expected["validated"] == pytest.approx(expected["logged"]) and expected["validated"] < expected["before"]


# -- what stays in memory


class Census(pl.Callback):
    """Tensors alive after each training batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_start(self, *args: Any) -> None:
        gc.collect()
        gc.freeze()

    def on_train_batch_end(self, *args: Any) -> None:
        gc.collect()
        self.counts.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))

    def on_train_end(self, *args: Any) -> None:
        gc.unfreeze()


class Forgetful(ToyModule):
    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.clear()


def census(options: dict[str, Any]) -> list[int]:
    count, module = Census(), Forgetful()
    trainer = make_trainer(2, options, accumulate_grad_batches=2, callbacks=[count], val_check_interval=4)
    rank = dist.get_rank()
    trainer.fit(module, loader(16, 2, rank), loader(2, 2, rank, first=50))
    return count.counts


@pytest.mark.parametrize("options", [{}, OVERLAP], ids=["plain", "overlapped"])
def test_no_step_leaves_anything_behind(options: dict[str, Any]) -> None:
    for counts in run_distributed(census, 2, options):
        # Gradients and optimizer states exist from the first window on; a window's first batch may leave its graph parked.
        # A gloo thread may hold a tensor or two a moment longer; one left behind a window would be four by then.
        for phase in (0, 1):
            early, late = counts[4 + phase : 8 : 2], counts[12 + phase :: 2]
            assert len(late) == 2 and min(late) <= max(early) + 2, counts


# -- fresh memory full of NaN


def poisoned(poison: bool) -> dict[str, Any]:
    torch.use_deterministic_algorithms(poison)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        return train(Run(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, options=OVERLAP), 2, 2)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_memory_held_before_does_not_matter() -> None:
    plain, full_of_nan = run_distributed(poisoned, 2, False), run_distributed(poisoned, 2, True)
    for one, other in zip(plain, full_of_nan, strict=True):
        assert torch.equal(one["losses"], other["losses"]) and other["losses"].isfinite().all()
        assert all(torch.equal(parameter, other["params"][name]) for name, parameter in one["params"].items())


# -- dense first and last layers, experts in some


def some_layers(ep_size: int | None) -> dict[str, Any]:
    net = Toy()
    net.moe = nn.ModuleList([Dense(), make_moe(24, 8, 3), Dense(), make_moe(40, 4, 2), Dense()])
    net.forward = lambda x, sometimes: net.last(nn.Sequential(net.first, *net.moe)(x))
    module = ToyModule(net)
    rank = dist.get_rank() if ep_size else None
    trainer = make_trainer(ep_size, {}, val_check_interval=2)
    trainer.fit(module, loader(4, 2, rank), loader(3, 2, rank, first=50))
    found = {"losses": torch.stack(module.losses), "params": parameters(trainer, module)}
    return {**found, "predicted": torch.stack(trainer.predict(Predicting(module), loader(2, 2, rank)))}


class Dense(nn.Linear):
    aux_loss = torch.tensor(0.0)

    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN)


class Predicting(pl.LightningModule):
    def __init__(self, module: ToyModule) -> None:
        super().__init__()
        self.module = module

    def predict_step(self, batches: list[Batch], batch_idx: int) -> Tensor:
        return torch.stack([self.module.net(batch.x, False) for batch in batches])


def test_only_some_layers_have_experts() -> None:
    expected, ranks = some_layers(None), run_distributed(some_layers, 2, 2)
    assert_trained_alike(ranks, expected)
    for rank, actual in enumerate(ranks):
        torch.testing.assert_close(actual["predicted"][:, 0], expected["predicted"][:, rank], rtol=1e-4, atol=1e-5)


# -- built on the meta device


class Late(ToyModule):
    """Built in `configure_model` on the meta device, with tied experts and running statistics."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            with torch.device("meta"):
                self.net = meta_toy()


def meta_toy() -> Toy:
    net = Toy()
    net.norm = nn.BatchNorm1d(HIDDEN)
    net.moe.append(make_moe(24, 8, 2))
    net.moe[2].experts = net.moe[0].experts
    return net


def on_meta(how: str, callbacks: bool) -> dict[str, Any]:
    pl.seed_everything(dist.get_rank(), verbose=False)  # dense parameters must become equal all the same
    strategy = EPOverlapStrategy(expert_model_parallel_size=2)
    ema = [EMAWeightAveraging(decay=0.5)] if callbacks else []
    trainer = quiet_trainer(strategy=strategy, use_distributed_sampler=False, callbacks=ema, max_epochs=2)
    if how == "configure_model":
        module: ToyModule = Late()
    else:
        with trainer.init_module(empty_init=True):
            module = ToyModule(meta_toy())
        assert all(p.is_meta for p in module.parameters())
    trainer.fit(module, loader(4, dist.get_world_size(), dist.get_rank()))
    net = module.net
    return {
        "digests": digests(strategy),
        "real": all(t.device.type == "cpu" and t.isfinite().all() for t in [*net.parameters(), *net.buffers()]),
        "tied": net.moe[2].experts.down_proj is net.moe[0].experts.down_proj,
        "local": net.moe[0].experts.down_proj.shape[0],
        "spread": net.moe[0].experts.gate_up_proj.std().item(),
        "down": net.moe[0].experts.down_proj.detach().clone(),
        "trained": bool(torch.stack(module.losses).isfinite().all()),
    }


@pytest.mark.parametrize("callbacks", [False, True], ids=["", "EMA"])
@pytest.mark.parametrize("how", ["configure_model", "init_module"])
def test_built_on_the_meta_device(how: str, callbacks: bool) -> None:
    ranks = run_distributed(on_meta, 4, how, callbacks)
    assert_replicas_equal(ranks)
    for rank in ranks:
        assert rank["real"] and rank["tied"] and rank["local"] == 4
        assert rank["spread"] == pytest.approx(0.3, rel=0.2)  # initializer_range
        assert rank["trained"]
    assert not torch.equal(ranks[0]["down"], ranks[1]["down"])  # no expert is another's copy


def neither() -> str:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.zeros(3))

    module = ToyModule()
    with torch.device("meta"):
        module.net.table = Table()
    with pytest.raises(ValueError) as error:
        make_trainer(2, {}).fit(module, loader(1, 2, dist.get_rank()))
    return str(error.value)


def test_what_cannot_be_initialised_is_named() -> None:
    for message in run_distributed(neither, 2):
        assert message.startswith("'net.table' (Table) was built on the meta device and has no reset_parameters()")


# -- what is each rank's own


class OwnBias(ToyModule):
    """The first bias is each rank's own: neither broadcast nor reduced."""

    def __init__(self) -> None:
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["net.first.bias"]
        self.local: list[Tensor] = []
        with torch.no_grad():
            self.net.first.bias.fill_(0.1 * dist.get_rank())
        self.net.first.bias.register_hook(self.local.append)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def own_bias() -> tuple[Tensor, Tensor, dict[str, str]]:
    module = OwnBias()
    result = train(Run(module, steps=3), 2, 2)
    expected = torch.full((HIDDEN,), 0.1 * dist.get_rank()) - 0.1 * torch.stack(module.local).sum(0)
    shared = {name: digest for name, digest in result["digests"].items() if "first.bias" not in name}
    return module.net.first.bias.detach(), expected, shared


def test_parameters_that_the_user_keeps_from_ddp_are_kept_from_us() -> None:
    ranks = run_distributed(own_bias, 2)
    assert_replicas_equal([{"digests": shared} for _, _, shared in ranks])
    for bias, expected, _ in ranks:
        torch.testing.assert_close(bias, expected)
    assert not torch.allclose(ranks[0][0], ranks[1][0])


def different_starts() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    net = Toy(seed=dist.get_rank())
    strategy = EPOverlapStrategy(expert_model_parallel_size=2)
    module = ToyModule(net)
    trainer = quiet_trainer(strategy=strategy, use_distributed_sampler=False)
    trainer.validate(module, loader(1, 4, dist.get_rank()), verbose=False)
    validated = digests(strategy)
    trainer.fit(module, loader(2, 4, dist.get_rank()))
    return {"validated": validated, "digests": digests(strategy)}


def test_ranks_that_start_from_different_weights_become_replicas() -> None:
    ranks = run_distributed(different_starts, 4)
    assert_replicas_equal(ranks)
    assert_replicas_equal([{"digests": rank["validated"]} for rank in ranks])


# -- hooks that record the router's logits


def router_logits() -> list[Tensor]:
    model = tiny_model("qwen3_moe")
    module = Recording(model)
    trainer = make_trainer(2, {})
    ids = make_tokens(0, 0, dist.get_rank())
    return trainer.predict(module, DataLoader([ids], batch_size=None))[0]


class Recording(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: list[tuple[int, ...]] = []
        for name, part in model.named_modules():
            if re.fullmatch(r".*mlp\.experts", name):
                part.register_forward_hook(lambda module, args, out: self.seen.append(tuple(out.shape)))

    def predict_step(self, ids: Tensor, batch_idx: int) -> list[Tensor]:
        out = self.model(input_ids=ids, output_router_logits=True)
        assert len(self.seen) == len(out.router_logits)  # a user's hooks on the experts run too
        return [*out.router_logits, out.aux_loss, out.logits]


def test_router_logits_are_recorded_as_ever() -> None:
    model = tiny_model("qwen3_moe").eval()
    for rank, actual in enumerate(run_distributed(router_logits, 2)):
        with torch.no_grad():
            out = model(input_ids=make_tokens(0, 0, rank), output_router_logits=True)
        torch.testing.assert_close(actual, [*out.router_logits, out.aux_loss, out.logits], rtol=1e-5, atol=1e-5)
