"""A small model with everything that data parallelism stumbles over, trained by the same Trainer code on any world.

The oracle of a distributed run is the same run in one process with Lightning's own strategy, whose batches hold those of
all ranks: the loss is the mean over ranks. So callbacks, schedulers, clipping and loops are Lightning's in both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy, MoELayer
from tests.trained import quiet_trainer, whole

HIDDEN = 16


class Toy(nn.Module):
    """Dense layers around two MoE layers of different sizes; one branch that only some batches take, one that none do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moe = nn.ModuleList([make_moe(24, 8, 3), make_moe(40, 4, 2)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.sometimes = nn.Linear(HIDDEN, HIDDEN)
        self.never = nn.Linear(HIDDEN, HIDDEN)
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, sometimes: bool = False) -> Tensor:
        x = self.first(x)
        x = x + self.moe[0](x)
        if sometimes:
            x = x + self.sometimes(x)
        x = x + self.moe[1](self.norm(x))
        for layer in self.moe[2:]:
            x = x + layer(x)
        return self.last(x)


def make_moe(inner: int, num_experts: int, top_k: int) -> MoELayer:
    return MoELayer(HIDDEN, inner, num_experts, top_k, initializer_range=0.3)


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    sometimes: bool


def make_batch(index: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * index + rank)
    x, y = torch.randn(2, 5, HIDDEN, generator=generator)
    return Batch(x, y, sometimes=index % 2 == 0 and rank == 0)


class ToyModule(pl.LightningModule):
    """Trains `Toy` with AdamW. A batch is a list: those of the ranks that this process stands for."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = Toy() if net is None else net
        self.losses: list[Tensor] = []

    def loss(self, batch: Batch) -> Tensor:
        return (self.net(batch.x, batch.sometimes) - batch.y).square().mean() + 0.05 * self.aux_loss()

    def aux_loss(self) -> Tensor:
        return sum(layer.aux_loss for layer in self.net.moe)

    def training_step(self, batches: list[Batch], batch_idx: int) -> Tensor | None:
        losses = torch.stack([self.loss(batch) for batch in batches])
        self.losses.append(losses.detach())
        return losses.mean()

    def validation_step(self, batches: list[Batch], batch_idx: int) -> None:
        self.log("val_loss", torch.stack([self.loss(batch) for batch in batches]).mean(), sync_dist=True)

    def test_step(self, batches: list[Batch], batch_idx: int) -> None:
        self.log("test_loss", torch.stack([self.loss(batch) for batch in batches]).mean(), sync_dist=True)

    def predict_step(self, batches: list[Batch], batch_idx: int) -> Tensor:
        return torch.stack([self.net(batch.x) for batch in batches])

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


def adamw(parameters: Any, lr: float = 1e-2, **options: Any) -> torch.optim.Optimizer:
    # With the usual eps of 1e-8 a gradient that is rounding noise would become a step of full size, in any direction.
    return torch.optim.AdamW(parameters, lr=lr, eps=1e-4, **options)


@dataclass
class Run:
    """What is trained, and how. `options` are the strategy's."""

    module: pl.LightningModule = field(default_factory=ToyModule)
    trainer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    watch: Callable[[pl.Trainer, pl.LightningModule], Any] = lambda trainer, module: None


def loader(steps: int, world_size: int, rank: int | None, first: int = 0) -> DataLoader:
    """Batches of `rank`, or of all ranks together for None."""
    ranks = range(world_size) if rank is None else [rank]
    batches = [[make_batch(index, r) for r in ranks] for index in range(first, first + steps)]
    return DataLoader(batches, batch_size=None)


def make_trainer(ep_size: int | None, options: dict[str, Any], **kwargs: Any) -> pl.Trainer:
    if ep_size is None:
        return quiet_trainer(strategy="auto", **kwargs)
    strategy = EPOverlapStrategy(expert_model_parallel_size=ep_size, **options)
    return quiet_trainer(strategy=strategy, use_distributed_sampler=False, **kwargs)


def train(run: Run, world_size: int, ep_size: int | None) -> dict[str, Any]:
    """Fit, as this rank of a spread model or (`ep_size` None) as the one process that stands for all.

    Returns the losses, the parameters with experts gathered, what `run.watch` saw, and a digest of what has to be equal:
    dense parameters and buffers on all ranks, experts on the ranks that share them.
    """
    module, result = run.module, {}
    if ep_size is None:
        trainer = make_trainer(None, {}, **run.trainer)
        trainer.fit(module, loader(run.steps, world_size, None))
        result["params"] = {n: p.detach().clone() for n, p in module.named_parameters()}
    else:
        trainer = make_trainer(ep_size, run.options, **run.trainer)
        trainer.fit(module, loader(run.steps, world_size, dist.get_rank()))
        result["params"] = whole(trainer.strategy, dict(module.named_parameters()), prefix="")
        result["digests"] = digests(trainer.strategy)
    losses = getattr(module, "losses", [])
    return {**result, "losses": torch.stack(losses) if losses else None, "seen": run.watch(trainer, module)}


def digests(strategy: EPOverlapStrategy) -> dict[str, str]:
    module, experts = strategy.lightning_module, strategy.parallel.expert_tensors()
    found = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        where = f"experts of EP rank {strategy.mesh.ep_rank}" if tensor in experts else "dense"
        found[f"{where}: {name}"] = hashlib.sha256(
            tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        ).hexdigest()
    return found


def assert_replicas_equal(ranks: list[dict[str, Any]]) -> None:
    """Bit for bit, after training."""
    known: dict[str, str] = {}
    for rank in ranks:
        for name, digest in rank["digests"].items():
            assert known.setdefault(name, digest) == digest, f"{name} differs between ranks"


def assert_trained_alike(actual: list[dict[str, Any]], expected: dict[str, Any], rtol: float = 1e-5) -> None:
    for rank, run in enumerate(actual):
        torch.testing.assert_close(run["losses"][:, 0], expected["losses"][:, rank], rtol=rtol, atol=0)
        assert run["params"].keys() == expected["params"].keys()
        for name, want in expected["params"].items():
            error = (run["params"][name] - want).abs().max() / want.abs().max().clamp(min=1e-30)
            assert error <= rtol, f"{name}: relative error {error:.1e}"
