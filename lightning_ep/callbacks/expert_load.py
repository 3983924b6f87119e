"""ExpertLoad: which experts get how many tokens, and whether that is even."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ep.callbacks.metrics import load_statistics
from lightning_ep.dispatch.base import routing_observers
from lightning_ep.imports import is_available
from lightning_ep.strategy import EPOverlapStrategy


class ExpertLoad(pl.Callback):
    """Counts the tokens of every expert and layer while training; needs `EPOverlapStrategy`.

    Counted on the host, where the exchange has the numbers anyway; ranks are summed with one asynchronous all-reduce
    every `log_every_n_steps` of the Trainer. Logs, over the steps since the last time:

    - `expert_load/max_over_mean`: tokens of the busiest expert over the mean, in the most uneven layer (1 is even)
    - `expert_load/entropy`: of the load, in the most uneven layer, from 0 (one expert has all) to 1 (even)
    - `expert_load/dead`: experts without a token, of all layers
    - `expert_load/layer_0/max_over_mean` and so on: of each MoE layer

    At the end `expert_load.json` (rank 0) has the tokens of the whole run, a list of experts for each layer.

    Args:
        heatmap: also draw them, `expert_load.png`: layers against experts, over the mean of the layer. Needs matplotlib.
        dirpath: where the files go; the Trainer's log directory by default.

    Raises:
        ValueError: at the start of fit, for another strategy.
    """

    def __init__(self, heatmap: bool = False, dirpath: str | None = None) -> None:
        if heatmap and not is_available("matplotlib"):
            raise ValueError("heatmap=True needs matplotlib, which is not installed; pip install 'lightning-ep[plots]'")
        self.heatmap, self.dirpath = heatmap, dirpath
        self.total: list[Tensor] = []  # tokens of each layer's experts, [E], of all ranks; complete after fit
        self._pending: tuple[Tensor, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, EPOverlapStrategy):
            raise ValueError(f"ExpertLoad needs EPOverlapStrategy, not {type(strategy).__name__}; leave it out")
        assert strategy.parallel is not None and strategy.mesh is not None
        sizes = [found.num_experts for found in strategy.parallel.experts]
        self._shares = [strategy.mesh.local_experts(size) for size in sizes]
        self._folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        self._tokens = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        self.total = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        self._device, self._global_step, self._pending = module.device, trainer.global_step, None
        routing_observers.append(self._count)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        if self._pending is not None:
            self._log(trainer, module, self._arrived())
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._reduce()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._stop()
        if self._pending is not None:
            self._arrived()
        self._reduce()
        self._arrived()
        if trainer.is_global_zero:
            self._write()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _count(self, layer: int, tokens_per_expert: list[int]) -> None:
        if torch.is_grad_enabled():  # not validation
            self._tokens[layer][self._shares[layer]] += torch.tensor(tokens_per_expert)

    def _reduce(self) -> None:
        """Start summing what was counted over ranks; each rank filled in the experts that it holds."""
        counted, work = torch.cat(self._tokens).to(self._device), None
        if dist.get_world_size() > 1:
            work = dist.all_reduce(counted, async_op=True)
        for tokens in self._tokens:
            tokens.zero_()
        self._pending = counted, work

    def _arrived(self) -> list[Tensor]:
        assert self._pending is not None
        (counted, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        layers = list(counted.cpu().split([len(total) for total in self.total]))
        for total, tokens in zip(self.total, layers, strict=True):
            total += tokens
        return layers

    @staticmethod
    def _log(trainer: pl.Trainer, module: pl.LightningModule, layers: list[Tensor]) -> None:
        statistics = [load_statistics(tokens[None]) for tokens in layers]
        uneven = [s["max_over_mean"].item() for s in statistics]
        named = {
            "expert_load/max_over_mean": max(uneven),
            "expert_load/entropy": min(s["entropy"].item() for s in statistics),
            "expert_load/dead": float(sum(s["dead"].item() for s in statistics)),
        } | {f"expert_load/layer_{i}/max_over_mean": value for i, value in enumerate(uneven)}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        module.log_dict(named, on_step=True, on_epoch=False, logger=False, sync_dist=False, batch_size=1)

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "expert_load.json"
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps({"tokens": [total.tolist() for total in self.total]}) + "\n", encoding="utf-8")
        os.replace(partial, path)
        if self.heatmap:
            plot_load(self.total, self._folder / "expert_load.png")

    def _stop(self) -> None:
        if self._count in routing_observers:
            routing_observers.remove(self._count)


def plot_load(layers: list[Tensor], path: str | Path) -> None:
    """Heat map of tokens over the layer's mean: one row a layer, one column an expert; dead experts are crossed out."""
    from matplotlib.figure import Figure

    width = max(len(tokens) for tokens in layers)
    image = torch.full((len(layers), width), float("nan"))
    for row, tokens in enumerate(layers):
        image[row, : len(tokens)] = tokens / tokens.double().mean().clamp_min(1e-30)
    figure = Figure(
        figsize=(max(6.0, 0.09 * width + 2), max(3.2, 0.15 * len(layers) + 1.8)), dpi=120, layout="constrained"
    )
    axes = figure.subplots()
    # From 0 over 1 (even, white) to the busiest expert.
    drawn = axes.imshow(image, aspect="auto", cmap="PuOr_r", vmin=0, vmax=2, interpolation="nearest")
    dead = (image == 0).nonzero()
    axes.plot(dead[:, 1], dead[:, 0], "x", color="#F0E442", markersize=5)
    axes.set_xlabel("expert" + (" (x: not a single token)" if len(dead) else ""))
    axes.set_ylabel("MoE layer")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(drawn, label="tokens over the layer's mean", extend="max")
    figure.savefig(path)
