"""What a Trainer, its callbacks and a LightningModule may do, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

from tests.strategy.toy import (
    HIDDEN,
    Batch,
    Run,
    Toy,
    ToyModule,
    adamw,
    make_moe,
)

RUNS: dict[str, Callable[[], Run]] = {}
OVERLAP = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}


def trains(make: Callable[[], Run]) -> Callable[[], Run]:
    RUNS[make.__name__] = make
    return make


# -- the trainer's arguments


@trains
def plain() -> Run:
    return Run()


@trains
def two_halves_of_a_batch() -> Run:
    return Run(options={"overlap_schedule": "two_batch", **OVERLAP})


@trains
def accumulation() -> Run:
    # the last window of the epoch is shorter
    return Run(trainer={"accumulate_grad_batches": 4})


@trains
def clipping_by_norm() -> Run:
    return Run(trainer={"gradient_clip_val": 0.1, "accumulate_grad_batches": 2})


@trains
def clipping_by_value() -> Run:
    return Run(trainer={"gradient_clip_val": 1e-2, "gradient_clip_algorithm": "value"})


def lopsided() -> ToyModule:
    """The first expert's gradients are much larger than all others together."""
    module = ToyModule()
    module.net.moe[0].experts.down_proj.data[0] *= 40
    return module


@trains
def clipping_where_one_rank_has_the_large_gradients() -> Run:
    return Run(lopsided(), trainer={"gradient_clip_val": 0.1, "accumulate_grad_batches": 2})


@trains
def clipping_by_other_norms() -> Run:
    class Module(ToyModule):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip = getattr(self.trainer.strategy, "clip_grad_norm", torch.nn.utils.clip_grad_norm_)
            for norm_type in (float("inf"), 1.0, 3.0, 2.0):
                self.norms.append(clip(parameters, 0.05, norm_type=norm_type).item())

    module = Module()
    module.net = lopsided().net
    return Run(module, watch=lambda trainer, module: module.norms)


@trains
def several_epochs() -> Run:
    return Run(trainer={"max_epochs": 3, "accumulate_grad_batches": 2}, steps=3)


# -- optimizers


@trains
def parameter_groups_and_schedulers() -> Run:
    class Module(ToyModule):
        def configure_optimizers(self) -> Any:
            experts = [p for n, p in self.named_parameters() if "experts" in n]
            routers = [p for n, p in self.named_parameters() if "router" in n]
            rest = [p for n, p in self.named_parameters() if "router" not in n and "experts" not in n]
            groups = [{"params": experts, "lr": 3e-3}, {"params": routers, "weight_decay": 0.3}, {"params": rest}]
            optimizer = adamw(groups, amsgrad=True)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Run(Module(), watch=lambda trainer, module: [group["lr"] for group in trainer.optimizers[0].param_groups])


@trains
def momentum_and_an_optimizer_made_before_the_trainer() -> Run:
    class Module(ToyModule):
        def __init__(self) -> None:
            super().__init__()
            self.made = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)

        def configure_optimizers(self) -> Any:
            return self.made

    return Run(Module())


@trains
def fused_optimizer() -> Run:
    class Module(ToyModule):
        def configure_optimizers(self) -> Any:
            return adamw(self.parameters(), fused=True)

    return Run(Module())


# -- frozen and unused parameters


def frozen(*names: str) -> Run:
    module = ToyModule()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not any(n in name for n in names))
    return Run(module, trainer={"gradient_clip_val": 0.5})


@trains
def frozen_experts() -> Run:
    return frozen("experts")


@trains
def frozen_routers() -> Run:
    return frozen("router")


@trains
def frozen_first_layers() -> Run:
    # neither the first experts' tokens nor their weights need a gradient
    return frozen("first", "router")


@trains
def frozen_down_projections() -> Run:
    return frozen("down_proj", "norm")


@trains
def everything_frozen_but_the_experts() -> Run:
    return frozen("first", "router", "norm", "last", "sometimes", "never")


@trains
def unfreezing_in_the_middle() -> Run:
    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module: ToyModule) -> None:
            self.freeze([pl_module.net.moe[0].experts, pl_module.net.first], train_bn=False)

        def finetune_function(self, pl_module: ToyModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
            if epoch == 1:
                modules = [pl_module.net.moe[0].experts, pl_module.net.first]
                self.unfreeze_and_add_param_group(modules, optimizer, lr=1e-3)

    class Module(ToyModule):
        def configure_optimizers(self) -> Any:
            return adamw([p for p in self.parameters() if p.requires_grad])

    return Run(Module(), trainer={"callbacks": [Unfreeze()], "max_epochs": 3}, steps=2)


@trains
def weight_decay_of_what_is_never_used() -> Run:
    # Adam passes over a parameter without gradient; one with a gradient of zeros would decay.
    class Module(ToyModule):
        def configure_optimizers(self) -> Any:
            return adamw(self.parameters(), weight_decay=0.5)

    return Run(Module())


# -- modules


class TiedToy(Toy):
    """One set of experts in both layers, and one router's weight in both."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.ModuleList([make_moe(24, 8, 3), make_moe(24, 8, 2)])
        self.moe[1].experts.gate_up_proj = self.moe[0].experts.gate_up_proj
        self.moe[1].experts.down_proj = self.moe[0].experts.down_proj
        self.moe[1].router.weight = self.moe[0].router.weight


@trains
def tied_experts() -> Run:
    return Run(ToyModule(TiedToy()), trainer={"accumulate_grad_batches": 2})


@trains
def one_experts_module_in_two_layers() -> Run:
    net = Toy()
    net.moe[1] = make_moe(24, 8, 2)
    net.moe[1].experts = net.moe[0].experts
    return Run(ToyModule(net), trainer={"gradient_clip_val": 0.3})


@trains
def only_auxiliary_loss() -> Run:
    class Module(ToyModule):
        def loss(self, batch: Batch) -> Tensor:
            self.net(batch.x, batch.sometimes)
            return self.aux_loss()

    return Run(Module(), trainer={"accumulate_grad_batches": 3})


@trains
def running_statistics() -> Run:
    # Those of one process have seen other batches, but must be the same on all ranks.
    module = ToyModule()
    module.net.norm = nn.BatchNorm1d(HIDDEN)
    return Run(module, trainer={"accumulate_grad_batches": 2})


@trains
def activation_checkpointing() -> Run:
    class Module(ToyModule):
        def loss(self, batch: Batch) -> Tensor:
            out = torch.utils.checkpoint.checkpoint(self.net, batch.x, batch.sometimes, use_reentrant=False)
            return (out - batch.y).square().mean() + 0.05 * self.aux_loss()

    return Run(Module(), trainer={"accumulate_grad_batches": 2})


@trains
def dense_part_compiled() -> Run:
    module = ToyModule()
    module.net.first.compile(backend="aot_eager")
    module.net.last.compile(backend="aot_eager")
    return Run(module)


@trains
def built_in_configure_model() -> Run:
    class Module(ToyModule):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            if isinstance(self.net, nn.Identity):
                self.net = Toy()

    return Run(Module())


# -- callbacks that read parameters


@trains
def ema() -> Run:
    return Run(trainer={"callbacks": [EMAWeightAveraging(decay=0.7)], "accumulate_grad_batches": 2})


@trains
def ema_of_a_model_built_in_configure_model() -> Run:
    run = built_in_configure_model()
    run.trainer = {"callbacks": [EMAWeightAveraging(decay=0.7)]}
    return run


@trains
def stochastic_weight_averaging() -> Run:
    swa = StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1, annealing_epochs=1)
    return Run(trainer={"callbacks": [swa], "max_epochs": 4}, steps=2)


@trains
def accumulation_scheduler() -> Run:
    return Run(
        trainer={"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})], "max_epochs": 2, "gradient_clip_val": 0.2}
    )


@trains
def a_callback_that_copies_the_model() -> Run:
    class Distance(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: ToyModule) -> None:
            self.start = deepcopy(pl_module.net)

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: ToyModule, *args: Any) -> None:
            deepcopy(pl_module)

        def on_train_end(self, trainer: pl.Trainer, pl_module: ToyModule) -> None:
            x = torch.ones(3, HIDDEN)
            with torch.no_grad():
                self.moved = self.start(x) - pl_module.net(x)

    callback = Distance()
    return Run(trainer={"callbacks": [callback]}, watch=lambda trainer, module: callback.moved)


# -- manual optimization


class Manual(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@trains
def manual_optimization() -> Run:
    class Module(Manual):
        def training_step(self, batches: list[Batch], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batches, batch_idx))
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            optimizer.step()

    return Run(Module())


@trains
def manual_accumulation() -> Run:
    class Module(Manual):
        def training_step(self, batches: list[Batch], batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(super().training_step(batches, batch_idx))
            if batch_idx % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    return Run(Module())


@trains
def manual_steps_without_a_loss() -> Run:
    class Module(Manual):
        def training_step(self, batches: list[Batch], batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = super().training_step(batches, batch_idx)
            if batch_idx in (0, 4):
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return Run(Module())


@trains
def manual_accumulation_without_syncing() -> Run:
    class Module(Manual):
        def training_step(self, batches: list[Batch], batch_idx: int) -> None:
            optimizer, last = self.optimizers(), batch_idx % 3 == 2
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(super().training_step(batches, batch_idx))
                if last:
                    optimizer.step()
                    optimizer.zero_grad()

    return Run(Module())


def two_parts(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of two optimizers, each with experts and dense ones."""
    one = [p for n, p in module.named_parameters() if "moe.0" in n or "first" in n]
    other = [p for n, p in module.named_parameters() if not ("moe.0" in n or "first" in n)]
    return one, other


@trains
def two_optimizers_that_take_turns() -> Run:
    class Module(Manual):
        def training_step(self, batches: list[Batch], batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batches, batch_idx))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            one, other = two_parts(self)
            return adamw(one), adamw(other, lr=3e-3)

    return Run(Module(), steps=3)


class TwoParts(Manual):
    """Two optimizers whose parameters train one after the other, on gradients that both keep until they step."""

    def train_parts(self, batches: list[Batch], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(ToyModule.training_step(self, batches, batch_idx))
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        one, other = two_parts(self)
        return torch.optim.SGD(one, lr=0.1), torch.optim.SGD(other, lr=0.1)


@trains
def two_optimizers_that_step_together() -> Run:
    class Module(TwoParts):
        def training_step(self, batches: list[Batch], batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.train_parts(batches, batch_idx)
            for optimizer in self.optimizers():
                optimizer.step()

    return Run(Module(), steps=3)


@trains
def two_optimizers_that_accumulate() -> Run:
    class Module(TwoParts):
        def training_step(self, batches: list[Batch], batch_idx: int) -> None:
            self.train_parts(batches, batch_idx)
            if batch_idx % 2:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()

    return Run(Module(), steps=4)


@trains
def freezing_within_an_accumulation_window() -> Run:
    class Module(Manual):
        def training_step(self, batches: list[Batch], batch_idx: int) -> None:
            optimizer, last = self.optimizers(), batch_idx % 2 == 1
            strategy = self.trainer.strategy
            for name, parameter in self.named_parameters():
                if "moe.0.experts" in name or "last" in name:
                    parameter.requires_grad_(not last)
            blocks = not last and hasattr(strategy, "block_backward_sync")
            with strategy.block_backward_sync() if blocks else nullcontext():
                self.manual_backward(super().training_step(batches, batch_idx))
            if last:
                optimizer.step()
                optimizer.zero_grad()

    return Run(Module())


@trains
def complex_and_double_parameters() -> Run:
    class Net(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(HIDDEN // 2 + 1, dtype=torch.complex64))
            self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

        def forward(self, x: Tensor, sometimes: bool = False) -> Tensor:
            x = x + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=HIDDEN) * self.scale.float()
            return super().forward(x, sometimes)

    return Run(ToyModule(Net()), trainer={"gradient_clip_val": 0.3, "accumulate_grad_batches": 2})
