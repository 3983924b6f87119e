"""A Trainer run inside one rank of the process pool, and the comparison with the single-process reference."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ep import EPOverlapStrategy
from tests.reference import rank_loss, tiny_model, tokens

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class RankBatches(Dataset):
    """The reference's micro-batches of this rank, one an item."""

    def __init__(self, steps: int, accumulate: int, rank: int) -> None:
        self.batches = [tokens(step, micro, rank) for step in range(steps) for micro in range(accumulate)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


def make_optimizer(name: str, parameters: Any, lr: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    # With the usual eps of 1e-8 a gradient that is rounding noise would become a step of full size, in any direction.
    return torch.optim.AdamW(parameters, lr=lr, eps=1e-4)


class CausalLM(pl.LightningModule):
    def __init__(self, model: nn.Module, lr: float = 1e-2, optimizer: str = "adamw") -> None:
        super().__init__()
        self.model, self.lr, self.optimizer_name = model, lr, optimizer
        self.losses: list[Tensor] = []
        self.first_grads: dict[str, Tensor] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = rank_loss(self.model, batch[0])
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trainer.global_step == 0:
            self.first_grads = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.optimizer_name, self.parameters(), self.lr)


def quiet_trainer(**kwargs: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": dist.get_world_size() if dist.is_initialized() else 1,
            "num_sanity_val_steps": 0,
            "max_epochs": 1,
            **quiet,
            **kwargs,
        }
    )


def loader(steps: int, accumulate: int) -> DataLoader:
    return DataLoader(RankBatches(steps, accumulate, dist.get_rank()), batch_size=1)


def whole(strategy: EPOverlapStrategy, tensors: dict[str, Tensor], prefix: str = "model.") -> dict[str, Tensor]:
    """Experts gathered over the EP group, dense tensors as they are."""
    mesh, experts = strategy.mesh, strategy.parallel.expert_tensors()
    names = {n.removeprefix(prefix) for n, p in strategy.lightning_module.named_parameters() if p in experts}
    full = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        if name in names and mesh.ep_size > 1:
            parts = [torch.empty_like(tensor) for _ in range(mesh.ep_size)]
            dist.all_gather(parts, tensor, group=mesh.ep_group)
            tensor = torch.cat(parts)
        full[name] = tensor.clone()
    return full


def train_distributed(
    model_type: str,
    ep_size: int,
    steps: int,
    accumulate: int,
    clip: float | None,
    optimizer: str,
    lr: float,
    options: dict,
) -> dict[str, Any]:
    """What `reference_run` returns, from a Trainer with EPOverlapStrategy; experts gathered."""
    module = CausalLM(tiny_model(model_type, **options.get("model", {})), lr, optimizer)
    strategy = EPOverlapStrategy(expert_model_parallel_size=ep_size, **options.get("strategy", {}))
    trainer = quiet_trainer(
        strategy=strategy, accumulate_grad_batches=accumulate, gradient_clip_val=clip, use_distributed_sampler=False,
        **options.get("trainer", {}),
    )  # fmt: skip
    norms: list[float] = []

    class Norms(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            if strategy.last_grad_norm is not None and trainer.global_step > len(norms):
                norms.append(strategy.last_grad_norm.item())

    trainer.callbacks.append(Norms())
    trainer.fit(module, loader(steps, accumulate))
    return {
        "losses": [
            torch.stack(module.losses[i : i + accumulate]).mean().item()
            for i in range(0, steps * accumulate, accumulate)
        ],
        "norms": norms,
        "grads": whole(strategy, module.first_grads),
        "params": whole(strategy, dict(module.model.named_parameters())),
    }
