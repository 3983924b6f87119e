"""ExpertLoad over two ranks, against the router's own choices."""

import json

import pytest
import torch
from PIL import Image

from lightning_ep import EPOverlapStrategy
from lightning_ep.callbacks import ExpertLoad
from lightning_ep.callbacks.expert_load import plot_load
from lightning_ep.callbacks.metrics import load_statistics
from lightning_ep.dispatch.base import routing_observers
from tests.callbacks.training import fit
from tests.distributed import run_distributed
from tests.reference import tiny_model
from tests.trained import CausalLM, loader, quiet_trainer


class Watched(CausalLM):
    """Notes what the routers chose, in the order of the MoE layers."""

    def on_train_start(self) -> None:
        self.chosen: dict[int, torch.Tensor] = {}
        for layer, found in enumerate(self.trainer.strategy.parallel.experts):
            found.module.register_forward_pre_hook(lambda module, args, layer=layer: self._note(layer, args[1]))

    def _note(self, layer: int, top_k_index: torch.Tensor) -> None:
        experts = self.trainer.strategy.parallel.experts[layer].num_experts
        self.chosen[layer] = self.chosen.get(layer, 0) + torch.bincount(top_k_index.flatten(), minlength=experts)


def _train(root: str) -> tuple[list, list, dict]:
    load = ExpertLoad(heatmap=True, dirpath=root)
    module = Watched(tiny_model("qwen3_moe"))
    trainer = quiet_trainer(
        strategy=EPOverlapStrategy(2), callbacks=[load], accumulate_grad_batches=2, log_every_n_steps=2,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, loader(5, 2))
    assert load._count not in routing_observers
    logged = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("expert_load/")}
    return [t.tolist() for t in load.total], [module.chosen[i].tolist() for i in sorted(module.chosen)], logged


def test_counts_are_the_routers_choices(tmp_path):
    (total, first, logged), (total_elsewhere, second, logged_elsewhere) = run_distributed(_train, 2, str(tmp_path))
    expected = torch.tensor(first) + torch.tensor(second)
    assert total == total_elsewhere == expected.tolist()
    assert json.loads((tmp_path / "expert_load.json").read_text()) == {"tokens": expected.tolist()}
    layers = [f"expert_load/layer_{i}/max_over_mean" for i in range(len(total))]
    assert logged == logged_elsewhere
    assert set(logged) == {"expert_load/max_over_mean", "expert_load/entropy", "expert_load/dead", *layers}
    assert logged["expert_load/max_over_mean"] == max(logged[name] for name in layers) >= 1
    assert 0 < logged["expert_load/entropy"] <= 1
    with Image.open(tmp_path / "expert_load.png") as image:
        assert image.width > 400


def test_statistics_of_uneven_layers():
    found = load_statistics(torch.tensor([[4, 0, 0, 0], [1, 1, 1, 1]]))
    assert {name: values.tolist() for name, values in found.items()} == {
        "max_over_mean": [4.0, 1.0],
        "entropy": [0.0, 1.0],
        "dead": [3, 0],
    }


def test_heat_map_of_layers_of_different_sizes(tmp_path):
    plot_load([torch.tensor([5, 0, 1, 2]), torch.tensor([3, 3])], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_other_strategies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs EPOverlapStrategy, not SingleDeviceStrategy"):
        fit(tmp_path, ExpertLoad())
