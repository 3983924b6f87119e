"""Trainer runs in one rank of the process pool (or in a plain process) that save, load and resume."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy
from tests.reference import tiny_model, tokens
from tests.trained import CausalLM, RankBatches, loader, quiet_trainer, whole

STEPS = 3
MODEL = "qwen3_moe"


class Scheduled(CausalLM):
    """Two optimizers' worth of trouble in one: parameter groups, a schedule, momentum, a frozen parameter."""

    def __init__(self, seed: int = 0, freeze: str | None = None, skip: str | None = None, num_experts: int = 8) -> None:
        super().__init__(tiny_model(MODEL, seed=seed, num_experts=num_experts))
        self.skip = skip
        self.save_hyperparameters()
        for name, p in self.model.named_parameters():
            p.requires_grad_(freeze is None or freeze not in name)

    def configure_optimizers(self) -> Any:
        parameters = {n: p for n, p in self.model.named_parameters() if self.skip is None or self.skip not in n}
        flat = [p for p in parameters.values() if p.dim() < 2]
        groups = [
            {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": flat, "weight_decay": 0.0, "lr": 2e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=4e-3, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class TwoOptimizers(CausalLM):
    """Manual optimization: experts by SGD with momentum, the rest by AdamW."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(tiny_model(MODEL, seed=seed))
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(loss.detach())
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        experts = [p for n, p in self.model.named_parameters() if "experts" in n]
        rest = [p for n, p in self.model.named_parameters() if "experts" not in n]
        return torch.optim.SGD(experts, lr=1e-2, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2, eps=1e-4)


def checkpoints(folder: Path, **options: Any) -> ModelCheckpoint:
    every_epoch = {"filename": "{epoch}", "save_top_k": -1, "save_last": True}
    return ModelCheckpoint(dirpath=folder, enable_version_counter=False, **{**every_epoch, **options})


def fit(
    module: CausalLM,
    folder: Path | None,
    ep_size: int | None,
    epochs: int = 1,
    ckpt_path: Any = None,
    callbacks: tuple = (),
    data: DataLoader | None = None,
    **options: Any,
) -> pl.Trainer:
    """`ep_size=None` trains with Lightning's own strategy for the number of processes."""
    saving = [checkpoints(folder)] if folder is not None else []
    plain = "ddp" if torch.distributed.get_world_size() > 1 else "auto"
    trainer = quiet_trainer(
        strategy=plain if ep_size is None else EPOverlapStrategy(expert_model_parallel_size=ep_size),
        max_epochs=epochs,
        callbacks=[*saving, *callbacks],
        **{"enable_checkpointing": bool(saving), **options},
        use_distributed_sampler=False,
        gradient_clip_val=1.0 if module.automatic_optimization else None,
    )
    trainer.fit(module, loader(STEPS, 1) if data is None else data, ckpt_path=ckpt_path)
    return trainer


def result(trainer: pl.Trainer, module: CausalLM) -> dict[str, Any]:
    return {
        "losses": [loss.item() for loss in module.losses],
        "params": whole(trainer.strategy, dict(module.model.named_parameters()))
        if isinstance(trainer.strategy, EPOverlapStrategy)
        else {n: p.detach().clone() for n, p in module.model.named_parameters()},
        "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
    }


class Remembers(pl.Callback):
    """Keeps what can be saved safely, and what cannot."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        nested = [{"count": 3, "module": nn.Linear(1, 1)}]
        shard = next(p for n, p in self.module.named_parameters() if "experts" in n).detach()
        return {"where": Path("/a/b"), "array": np.arange(3), "code": print, "nested": nested, "shadow": [shard]}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.module = pl_module

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def train(
    kind: type[CausalLM],
    folder: Path | None,
    ep_size: int | None,
    epochs: int,
    ckpt_path: Any,
    arguments: dict,
    ema: bool = False,
) -> dict[str, Any]:
    """One fit, checkpoints in `folder`; what it computed. Another seed shows that weights come from the checkpoint."""
    module = kind(**arguments)
    callbacks = (EMAWeightAveraging(decay=0.8),) if ema else ()
    return result(fit(module, folder, ep_size, epochs, ckpt_path, callbacks), module)


class Resumable(DataLoader):
    """Counts what it gave, and goes on from there."""

    given = skip = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.given, self.skip = self.skip, 0
        for batch in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["given"]


def train_saving_midway(folder: Path | None, ep_size: int, ckpt_path: Path | None, seed: int) -> dict[str, Any]:
    module = Scheduled(seed=seed)
    data = Resumable(loader(STEPS, 1).dataset, batch_size=1)
    saving = checkpoints(folder, filename="{step}", every_n_train_steps=2) if folder else None
    callbacks = (saving,) if saving else ()
    return result(
        fit(module, None, ep_size, 2, ckpt_path, callbacks, data, enable_checkpointing=saving is not None), module
    )


def remember(folder: Path, ckpt_path: Path | None) -> tuple[dict[str, Any], list[str]]:
    """A callback's state after loading, and the warnings of the run."""
    callback = Remembers()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Scheduled(), folder, 2, 2 if ckpt_path else 1, ckpt_path, (callback,))
    return callback.loaded, [str(w.message) for w in caught if "saved" in str(w.message)]


def resave(source: Path, target: Path, ep_size: int | None) -> None:
    """Load model and optimizer into a model of another seed, train nothing, save."""
    trainer = fit(Scheduled(seed=7), None, ep_size, 1, source)
    assert trainer.global_step == STEPS
    trainer.save_checkpoint(target)


def keep_best(folder: Path) -> tuple[list[str], str]:
    """Two of four checkpoints stay; what is then there, and the path of the best."""
    callback = checkpoints(folder, save_top_k=2, monitor="score", mode="max", save_weights_only=True, save_last="link")

    class Scores(Scheduled):
        def on_train_epoch_end(self) -> None:
            self.log("score", [1.0, 4.0, 2.0, 3.0][self.trainer.current_epoch])

    fit(Scores(), None, 2, 4, None, (callback,), enable_checkpointing=True)
    return sorted(p.name for p in folder.iterdir()), callback.best_model_path


def failing_loads(saved: Path) -> list[str]:
    """What is said when a checkpoint of `Scheduled` is loaded into something else."""
    extra = Scheduled()
    extra.extra = nn.Linear(2, 2)
    two = TwoOptimizers()
    skip = Scheduled(skip="experts")
    twice = Scheduled(num_experts=16)  # as many a rank as the checkpoint has in all
    return [failure(fit, module, None, 2, 2, saved) for module in (extra, two, skip, twice)]


def failure(fn: Callable, *args: Any) -> str:
    """What `fn` raises, as text: the pool of processes survives it."""
    try:
        fn(*args)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


class Predict(Scheduled):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0]).logits


def logits(ckpt_path: Path, ep_size: int) -> Tensor:
    """This rank's logits after loading into a model of another seed."""
    trainer = quiet_trainer(
        strategy=EPOverlapStrategy(expert_model_parallel_size=ep_size), use_distributed_sampler=False
    )
    return trainer.predict(Predict(seed=5), DataLoader(RankBatches(1, 1, 0), batch_size=1), ckpt_path=ckpt_path)[0]


def plain_logits(state_dict: dict[str, Tensor]) -> Tensor:
    """The same in one process with nothing of ours."""
    model = tiny_model(MODEL, seed=6)
    model.load_state_dict({k.removeprefix("model."): v for k, v in state_dict.items()})
    with torch.no_grad():
        return model(input_ids=tokens(0, 0, 0)).logits
