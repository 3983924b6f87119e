"""What ranks run in fault tests: a Trainer with a tiny MoE model, and a fault at a chosen place, batch and rank."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ep import EPOverlapStrategy
from tests.faults.processes import note, strike
from tests.reference import rank_loss, tiny_model, tokens
from tests.trained import CausalLM

RANK = "RANK"


def rank() -> int:
    return int(os.environ[RANK])


def act(kind: str) -> Any:
    """The fault itself."""
    strike()
    if kind == "raise":
        raise ValueError("boom")
    if kind == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if kind == "exit":
        os._exit(3)
    if kind == "hang":
        time.sleep(1000)
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
    os.kill(os.getpid(), signals[kind])


class Fault:
    """`kind` at hook `place`, batch `batch`, on the ranks `ranks`."""

    def __init__(self, kind: str, place: str, batch: int = 2, ranks: tuple[int, ...] = (1,)) -> None:
        self.kind, self.place, self.batch, self.ranks = kind, place, batch, ranks

    def __call__(self, place: str, batch: int) -> bool:
        """Strikes if its time has come; whether it was a fault that the caller has to commit."""
        if (place, batch) != (self.place, self.batch) or rank() not in self.ranks:
            return False
        if self.kind in ("none", "skip", "stop training", "log", "nan"):
            strike()
            return True
        act(self.kind)
        return False


class FaultyLM(CausalLM):
    """The tests' language model with a fault."""

    def __init__(self, fault: Fault | None = None, **model: Any) -> None:
        super().__init__(tiny_model("qwen3_moe", **model))
        self.fault = fault or Fault("", "nowhere")
        self.batches = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.batches += 1
        if self.fault("training_step", batch_idx):
            if self.fault.kind == "none":
                return None
            if self.fault.kind == "log":
                self.log("alone", 1.0, sync_dist=True)
            if self.fault.kind == "stop training":
                self.trainer.should_stop = True
            if self.fault.kind == "nan":
                return rank_loss(self.model, batch[0]) * float("nan")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.fault("on_train_epoch_end", self.trainer.current_epoch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.fault("validation_step", batch_idx)
        self.log("val_loss", rank_loss(self.model, batch[0]))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.fault("predict_step", batch_idx)
        return self.model(input_ids=batch[0]).logits


class SkippingLM(FaultyLM):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if self.fault("on_train_batch_start", batch_idx) else None


class FaultyCallback(pl.Callback):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_batch_end(self, trainer: pl.Trainer, module: FaultyLM, *_: Any) -> None:
        # Not every fault of a callback is an exception.
        if self.fault("callback", trainer.fit_loop.epoch_loop.batch_idx) and self.fault.kind == "stop training":
            trainer.should_stop = True


class Batches(IterableDataset):
    """`count` batches of this rank, the last one smaller and of another length, of a length that nobody knows."""

    def __init__(self, count: int, fault: Fault | None = None) -> None:
        self.count, self.fault = count, fault

    def __iter__(self):
        for i in range(self.count):
            if self.fault is not None:
                self.fault("loader", i)
            yield batch(i)


class SizedBatches(torch.utils.data.Dataset):
    """The same with a length."""

    def __init__(self, count: int, fault: Fault | None = None) -> None:
        self.count, self.fault = count, fault

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        if self.fault is not None:
            self.fault("loader", i)
        return batch(i)


def batch(i: int) -> Tensor:
    """Every rank's batches differ in the number and the length of their sequences."""
    return tokens(i, 0, rank(), batch=1 + (i + rank()) % 2)[:, : 6 + rank() + i % 3]


def loader(count: int, sized: bool = True, fault: Fault | None = None, **options: Any) -> DataLoader:
    return DataLoader((SizedBatches if sized else Batches)(count, fault), batch_size=1, **options)


def trainer(timeout: float = 5, ep_size: int | None = None, **options: Any) -> pl.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.(fabric|pytorch)")
    warnings.filterwarnings("ignore", category=FutureWarning)
    world_size = int(os.environ["WORLD_SIZE"])
    strategy_options = options.pop("strategy", {})
    return pl.Trainer(**{
        "accelerator": "cpu", "devices": world_size, "num_sanity_val_steps": 0, "max_epochs": 1, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "strategy": EPOverlapStrategy(
            expert_model_parallel_size=ep_size or world_size, timeout=timedelta(seconds=timeout), **strategy_options
        ),
        **options,
    })  # fmt: skip


def fit(fault: Fault | None = None, batches: Any = 6, lm: type[FaultyLM] = FaultyLM, **options: Any) -> FaultyLM:
    """One fit; notes how many batches this rank trained."""
    sized, workers = options.pop("sized", True), options.pop("num_workers", 0)
    validation = options.pop("validation", 0)
    module = lm(fault, **options.pop("model", {}))
    folder = Path(os.environ["FAULT_FOLDER"])
    callbacks = [FaultyCallback(module.fault)]
    if options.pop("on_exception", False):
        callbacks.append(OnExceptionCheckpoint(folder))
    if (every := options.pop("checkpoint_every", 0)) > 0:
        options["enable_checkpointing"] = True
        callbacks.append(
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=every, save_top_k=-1, save_last=True)
        )
    if options.pop("save_on_exception", False):
        options["enable_checkpointing"] = True
        callbacks.append(ModelCheckpoint(folder / "checkpoints", save_on_exception=True, save_top_k=-1))
    count = batches if isinstance(batches, int) else batches[rank()]
    run = trainer(callbacks=callbacks, **options)
    data = loader(count, sized, module.fault, num_workers=workers)
    val = [loader(validation, fault=module.fault)] if validation else []
    run.fit(module, data, *val)
    note(f"trained{rank()}", f"{module.batches} {run.current_epoch}")
    return module
