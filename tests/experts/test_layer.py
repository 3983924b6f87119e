"""`MoELayer`: against a loop over tokens in one process, and the same spread over ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy, MoELayer, find_experts
from tests.distributed import run_distributed
from tests.trained import quiet_trainer, whole

D, I, E, K = 16, 24, 8, 3


def loop_over_tokens(layer: MoELayer, x_TD: Tensor) -> Tensor:
    """What the layer means, one token and one expert at a time."""
    rows = []
    for x in x_TD:
        probabilities = (layer.router.weight @ x).softmax(0)
        weights, chosen = probabilities.topk(layer.router.top_k)
        if layer.router.normalize_weights:
            weights = weights / weights.sum()
        out = torch.zeros_like(x)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up = (layer.experts.gate_up_proj[expert] @ x).chunk(2)
            out = out + weight * (layer.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("normalize_weights", [True, False])
def test_forward_and_gradients_match_a_loop_over_tokens(normalize_weights: bool) -> None:
    torch.manual_seed(0)
    layer = MoELayer(D, I, E, K, normalize_weights, initializer_range=0.3).double()
    x = torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    tensors = (x, *layer.parameters())
    cotangent = torch.randn(2, 7, D, dtype=torch.float64)
    expected = loop_over_tokens(layer, x.view(-1, D)).view_as(x)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(
        torch.autograd.grad((layer(x) * cotangent).sum(), tensors),
        torch.autograd.grad((expected * cotangent).sum(), tensors),
    )


def test_aux_loss_is_one_when_even_and_large_when_one_expert_gets_everything() -> None:
    layer = MoELayer(E, I, E, 1)
    tokens = torch.eye(E)  # token e likes expert e
    layer.router.weight.data = 20 * torch.eye(E)
    layer(tokens)
    torch.testing.assert_close(layer.aux_loss, torch.tensor(1.0), rtol=1e-4, atol=0)
    layer(tokens[:1].expand(E, E))
    torch.testing.assert_close(layer.aux_loss, torch.tensor(float(E)), rtol=1e-4, atol=0)
    assert layer.aux_loss.requires_grad
    layer(tokens[:0])
    assert layer.aux_loss == 0


def test_mixed_precision_computes_in_it_and_answers_in_the_callers() -> None:
    torch.manual_seed(0)
    layer, x = MoELayer(D, I, E, K, initializer_range=0.3), torch.randn(5, D)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    assert mixed.dtype == torch.float32
    assert 0 < (mixed - layer(x)).abs().max() < 0.05 * layer(x).abs().max()


@pytest.mark.parametrize("sizes", [(D, I, 4, 5), (D, I, 4, 0), (D, 0, 4, 1)])
def test_meaningless_sizes_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"top_k={sizes[3]}"):
        MoELayer(*sizes)


def test_its_experts_are_found_and_run_as_grouped_gemms() -> None:
    (found,) = find_experts(nn.Sequential(nn.Linear(D, D), MoELayer(D, I, E, K)))
    assert (found.name, found.num_experts, found.sharded) == ("1.experts", E, ("gate_up_proj", "down_proj"))
    assert found.layout is not None


class Regression(pl.LightningModule):
    """Two layers, the second built in `configure_model`; the loss includes the auxiliary one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(MoELayer(D, I, E, K, initializer_range=0.3), nn.LayerNorm(D))
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if len(self.layers) == 2:
            torch.manual_seed(1)
            self.layers.append(MoELayer(D, I, E, K, initializer_range=0.3))

    def loss(self, x: Tensor) -> Tensor:
        mse = (self.layers(x) - x.roll(1, -1)).square().mean()
        return mse + 0.1 * (self.layers[0].aux_loss + self.layers[2].aux_loss)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


STEPS = 4


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, D, generator=torch.Generator().manual_seed(10 * step + rank))


def train_spread(ep_size: int) -> dict[str, Any]:
    module, strategy = Regression(), EPOverlapStrategy(expert_model_parallel_size=ep_size)
    trainer = quiet_trainer(strategy=strategy, use_distributed_sampler=False)
    trainer.fit(module, DataLoader([batch(step, dist.get_rank()) for step in range(STEPS)], batch_size=1))
    return {
        "losses": module.losses,
        "parameters": whole(strategy, dict(module.layers.named_parameters()), "layers."),
        "local": module.layers[0].experts.num_experts,
    }


@pytest.mark.parametrize("world_size, ep_size", [(2, 2), (2, 1)])
def test_spread_over_ranks_it_trains_as_in_one_process(world_size: int, ep_size: int) -> None:
    module = Regression()
    module.configure_model()
    optimizer = module.configure_optimizers()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        per_rank = torch.stack([module.loss(batch(step, rank)) for rank in range(world_size)])
        per_rank.mean().backward()
        optimizer.step()
        losses.append(per_rank.detach())
    for rank, spread in enumerate(run_distributed(train_spread, world_size, ep_size)):
        assert spread["local"] == E // ep_size
        torch.testing.assert_close(torch.stack(spread["losses"]), torch.stack(losses)[:, rank], rtol=1e-5, atol=0)
        torch.testing.assert_close(spread["parameters"], dict(module.layers.named_parameters()), rtol=1e-4, atol=1e-6)
