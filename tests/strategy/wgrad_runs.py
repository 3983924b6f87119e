"""A model with every kind of expert weight, trained with its gradients kept; also on GPUs (tests/gpu/check_wgrad.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_ep import EPOverlapStrategy
from lightning_ep.experts.layer import TopKRouter
from tests.strategy.toy import HIDDEN, ToyModule, digests, loader, make_moe
from tests.trained import quiet_trainer, whole


class _NeverLast(TopKRouter):
    """Sends no token to the last expert."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index_TK, weights_TK, aux_loss = super().forward(x_TD)
        return index_TK.clamp(max=self.weight.shape[0] - 2), weights_TK, aux_loss


class Net(nn.Module):
    """Four MoE layers: the second has the first one's experts, the third a frozen weight, the last an unused expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moe = nn.ModuleList([make_moe(24, 8, 3), make_moe(24, 8, 2), make_moe(40, 4, 2), make_moe(16, 4, 1)])
        self.moe[1].experts.gate_up_proj = self.moe[0].experts.gate_up_proj
        self.moe[1].experts.down_proj = self.moe[0].experts.down_proj
        self.moe[2].experts.down_proj.requires_grad_(False)
        self.moe[3].router = _NeverLast(HIDDEN, 4, 1, True, 0.3)
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, sometimes: bool = False) -> Tensor:
        x = self.first(x)
        for layer in self.moe:
            x = x + layer(x)
        return self.last(x)


class Module(ToyModule):
    """Keeps the gradients that every optimizer step sees, and how many waited when a hook could look."""

    def __init__(self) -> None:
        super().__init__(Net())
        self.seen: list[dict[str, Tensor]] = []
        self.waiting: list[int] = []

    def on_after_backward(self) -> None:
        self.waiting.append(len(self.trainer.strategy.parallel.queue))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.waiting.append(len(self.trainer.strategy.parallel.queue))
        self.seen.append({n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None})


def fit(options: dict[str, Any], accumulate: int, steps: int = 10, scaler: float = 0, **trainer: Any) -> dict[str, Any]:
    """The losses, every step's gradients, and the parameters in the end; `scaler`: 16-mixed from that scale on."""
    module, strategy = Module(), EPOverlapStrategy(2, **options)
    if scaler:
        # growth makes the scale overflow again and again
        scaling = torch.amp.GradScaler("cpu", init_scale=scaler, growth_interval=2)
        trainer["plugins"] = MixedPrecision("16-mixed", "cpu", scaling)
    fitted = quiet_trainer(
        strategy=strategy, accumulate_grad_batches=accumulate, use_distributed_sampler=False, **trainer
    )
    fitted.fit(module, loader(steps * accumulate, dist.get_world_size(), dist.get_rank()))
    result = {
        "losses": torch.stack(module.losses),
        "gradients": module.seen,
        "waiting": module.waiting,
        "params": whole(strategy, dict(module.named_parameters()), prefix=""),
        "digests": digests(strategy),
    }
    if scaler:
        result["scale"] = fitted.precision_plugin.scaler.get_scale()
    return result
