"""What ranks run in fault tests: a Trainer with a tiny MoE model, and a fault at a chosen place, batch and rank."""

from __future__ import annotations

import itertools
import logging
import os
import resource
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

from lightning_ep import EPOverlapStrategy, storage
from lightning_ep.guards import handshake
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
    warnings.filterwarnings("default", message=r"ranks? .* training batches")  # ours
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


def fit(fault: Fault | None = None, batches: Any = 6, lm: type[FaultyLM] = FaultyLM, **options: Any) -> None:
    """One fit; notes how many batches and epochs this rank trained.

    Args:
        batches: of every rank, or of each.
        options: the Trainer's; and some of ours.
    """
    take = options.pop
    sized, workers, validation = take("sized", True), take("num_workers", 0), take("validation", 0)
    ckpt_path, before = take("ckpt_path", None), take("before", None)
    if before is not None:
        before(fault)
    module = lm(fault, **take("model", {}))
    callbacks: list[pl.Callback] = [FaultyCallback(module.fault)]
    checkpoints = Path(os.environ["FAULT_FOLDER"], "checkpoints")
    if take("on_exception", False):
        options["enable_checkpointing"] = True
        callbacks.append(OnExceptionCheckpoint(checkpoints))
    if saving := take("saving", {}):
        options["enable_checkpointing"] = True
        callbacks.append(ModelCheckpoint(checkpoints, filename="{step}", save_top_k=-1, **saving))
    count = batches if isinstance(batches, int) else batches[rank()]
    run = trainer(callbacks=callbacks, **options)
    data = loader(count, sized, module.fault, num_workers=workers)
    val = [loader(validation, fault=module.fault)] if validation else []
    run.fit(module, data, *val, ckpt_path=ckpt_path)
    note(f"trained{rank()}", f"{module.batches} {run.current_epoch}")


def fit_with(differ: dict[str, tuple], **options: Any) -> None:
    """`fit` with options that each rank chooses for itself."""
    fit(**options, **{name: values[rank()] for name, values in differ.items()})


def predict(fault: Fault | None = None, batches: Any = 4, **options: Any) -> None:
    """Notes how many batches this rank predicted."""
    module = FaultyLM(fault)
    count = batches if isinstance(batches, int) else batches[rank()]
    outputs = trainer(**options).predict(module, loader(count))
    note(f"predicted{rank()}", str(len(outputs or [])))


def validate(fault: Fault | None = None, batches: Any = 4, **options: Any) -> None:
    count = batches if isinstance(batches, int) else batches[rank()]
    trainer(**options).validate(FaultyLM(fault), loader(count), verbose=False)


def other_options(_: Any) -> None:
    """Another handshake on rank 1: an older state of this package."""
    if rank() == 1:
        handshake.code_digest = lambda: "0123456789ab"


def dies_while_saving(fault: Fault) -> None:
    """The fault strikes inside the fourth save, of the second `last`: "write" while data is written, "replace" before it is put in place."""
    count = itertools.count(1)
    name = {"write": "write", "replace": "_put_in_place"}[fault.place]
    original = getattr(storage, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        fault(fault.place, next(count))
        return original(*args, **kwargs)

    setattr(storage, name, struck)


def full_disk(fault: Fault) -> None:
    """From the fourth save on (the second `last`), no file may grow on this rank."""
    count = itertools.count(1)
    original = storage.write

    def struck(*args: Any, **kwargs: Any) -> Any:
        if next(count) == 4 and rank() in fault.ranks:
            strike()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        return original(*args, **kwargs)

    storage.write = struck


class LostRouter(FaultyLM):
    """One rank's router gives an expert that does not exist."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__(fault)
        self.model.model.layers[1].mlp.experts.register_forward_pre_hook(self._lose)

    def _lose(self, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.fault.kind == "lost" and rank() in self.fault.ranks and self.batches == self.fault.batch + 1:
            strike()
            return args[0], torch.full_like(args[1], 8), *args[2:]
        return args
