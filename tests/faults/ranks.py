"""What ranks run in fault tests: a Trainer with a tiny MoE model, and a fault at a chosen place, batch and rank."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import resource
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ep import EPOverlapStrategy, storage
from lightning_ep.guards import handshake
from tests.faults.processes import note, note_session, strike
from tests.reference import rank_loss, tiny_model, tokens
from tests.trained import CausalLM

WORK = "work.pickle"
# Faults that the caller has to commit.
COMMITTED = ("none", "skip", "stop training", "log", "nan", "nan router", "nan experts", "clock")


def rank() -> int:
    # Lightning's own launcher sets no RANK, and nothing at all for the first.
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))


def world_size() -> int:
    return int(os.environ["FAULT_WORLD"])


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
    kind, _, whom = kind.partition(" ")
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
    os.kill(os.getppid() if whom == "parent" else os.getpid(), signals[kind])


class Fault:
    """`kind` at hook `place`, batch `batch`, on the ranks `ranks`."""

    def __init__(self, kind: str, place: str, batch: int = 2, ranks: tuple[int, ...] = (1,)) -> None:
        self.kind, self.place, self.batch, self.ranks = kind, place, batch, ranks

    def __call__(self, place: str, batch: int) -> bool:
        """Strikes if its time has come; whether it was a fault that the caller has to commit."""
        if (place, batch) != (self.place, self.batch) or rank() not in self.ranks:
            return False
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            return False
        if self.kind in COMMITTED:
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
        self.validated: list[int] = []
        self.tested = 0

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
        loss = super().training_step(batch, batch_idx)
        with open(Path(os.environ["FAULT_FOLDER"], f"losses{rank()}"), "a") as curve:
            curve.write(f"{self.trainer.global_step} {loss.item().hex()}\n")
        return loss

    def on_train_epoch_end(self) -> None:
        self.fault("on_train_epoch_end", self.trainer.current_epoch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.fault("validation_step", batch_idx)
        self.validated.append(self.batches)
        self.log("val_loss", rank_loss(self.model, batch[0]))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.tested += 1
        self.log("test_loss", rank_loss(self.model, batch[0]))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.fault("predict_step", batch_idx)
        return self.model(input_ids=batch[0]).logits


class SkippingLM(FaultyLM):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if self.fault("on_train_batch_start", batch_idx) else None


class ScoredLM(FaultyLM):
    """Better and better on rank 0; on rank 1 it is time to stop."""

    def on_train_epoch_end(self) -> None:
        self.log("score", float(self.trainer.current_epoch if rank() == 0 else 1))


class FaultyCallback(pl.Callback):
    """Faults that are no exceptions, too."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_batch_start(self, trainer: pl.Trainer, module: FaultyLM, batch: Any, batch_idx: int) -> None:
        if self.fault("batch start", batch_idx):
            mlp = module.model.model.layers[1].mlp
            spoilt = mlp.gate.weight if self.fault.kind == "nan router" else mlp.experts.down_proj
            spoilt.data.fill_(float("nan"))

    def on_train_batch_end(self, trainer: pl.Trainer, module: FaultyLM, *_: Any) -> None:
        if self.fault("callback", trainer.fit_loop.epoch_loop.batch_idx):
            if self.fault.kind == "stop training":
                trainer.should_stop = True
            if self.fault.kind == "clock":
                trainer._last_val_time -= 3600


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


class Remembering:
    """A loader that knows its place, so that a resumed run sees what it would have seen.

    With a length: Lightning takes one batch ahead from a loader without, and saves the place after that.
    """

    def __init__(self, count: int) -> None:
        self.count, self.given, self.start = count, 0, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        self.given, self.start = self.start, 0
        while self.given < self.count:
            self.given += 1
            yield batch(self.given - 1)[None]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


class Halves:
    """Batches of several sequences, for a schedule that splits them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return (tokens(i, 0, rank(), batch=4)[None] for i in range(self.count))

    def __len__(self) -> int:
        return self.count


def batch(i: int) -> Tensor:
    """Every rank's batches differ in the number and the length of their sequences."""
    return tokens(i, 0, rank(), batch=1 + (i + rank()) % 2)[:, : 6 + rank() + i % 3]


def shape(i: int, of: int) -> str:
    """Of batch `i` of rank `of`; with it in a list, one sees what was predicted and in what order."""
    return f"{1 + (i + of) % 2}x{min(10, 6 + of + i % 3)}"


def loader(count: int, kind: str = "sized", fault: Fault | None = None, **options: Any) -> Any:
    if kind in ("remembering", "halves"):
        return {"remembering": Remembering, "halves": Halves}[kind](count)
    return DataLoader({"sized": SizedBatches, "stream": Batches}[kind](count, fault), batch_size=1, **options)


def trainer(timeout: float = 5, ep_size: int | None = None, **options: Any) -> pl.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.(fabric|pytorch)")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("default", message=r"ranks? .* training batches")  # ours
    note_session()
    strategy_options = options.pop("strategy", {})
    return pl.Trainer(**{
        "accelerator": "cpu", "devices": world_size(), "num_sanity_val_steps": 0, "max_epochs": 1, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "strategy": EPOverlapStrategy(
            expert_model_parallel_size=ep_size or world_size(), timeout=timedelta(seconds=timeout), **strategy_options
        ),
        **options,
    })  # fmt: skip


def own(value: Any) -> Any:
    """A number of batches: of every rank, or this rank's of a tuple."""
    return value[rank()] if isinstance(value, tuple) else value


def fit(fault: Fault | None = None, batches: Any = 6, lm: type[FaultyLM] = FaultyLM, **options: Any) -> None:
    """One fit; notes how many batches and epochs this rank trained, and after which of them it validated.

    Args:
        batches: of every rank, or of each.
        options: the Trainer's; and some of ours.
    """
    take = options.pop
    data, workers, validation = take("data", "sized"), take("num_workers", 0), take("validation", 0)
    ckpt_path, before = take("ckpt_path", None), take("before", None)
    if before is not None:
        before(fault)
    folder = Path(os.environ["FAULT_FOLDER"])
    module = lm(fault, **take("model", {}))
    callbacks: list[pl.Callback] = [FaultyCallback(module.fault)]
    if take("on_exception", False):
        options["enable_checkpointing"] = True
        callbacks.append(OnExceptionCheckpoint(folder / "checkpoints"))
    if saving := take("saving", {}):
        options["enable_checkpointing"] = True
        callbacks.append(ModelCheckpoint(folder / "checkpoints", filename="{step}", save_top_k=-1, **saving))
    if take("early_stopping", False):
        callbacks.append(EarlyStopping("score", mode="max", patience=2, check_on_train_epoch_end=True))
    run = trainer(callbacks=callbacks, **options)
    train = loader(own(batches), data, module.fault, **({"num_workers": workers} if workers else {}))
    val = [loader(own(validation), fault=module.fault)] if validation else []
    run.fit(module, train, *val, ckpt_path=str(folder / ckpt_path) if ckpt_path not in (None, "last") else ckpt_path)
    note(f"trained{rank()}", f"{module.batches} {run.current_epoch}")
    note(f"validated{rank()}", " ".join(map(str, module.validated)))


def fit_with(differ: dict[str, tuple], **options: Any) -> None:
    """`fit` with options that each rank chooses for itself."""
    fit(**options, **{name: values[rank()] for name, values in differ.items()})


def predict(fault: Fault | None = None, batches: Any = 4, common: int = 0, **options: Any) -> None:
    """Notes what this rank predicted, in order: each batch's shape, or with `common` samples for all its tokens."""
    module = FaultyLM(fault)
    if common:
        data = DataLoader([tokens(i, 0, 0, batch=1)[0, : 4 + i][None] for i in range(common)], batch_size=1)
        options["use_distributed_sampler"] = True
    else:
        data = loader(own(batches))
    outputs = trainer(**options).predict(module, data) or []
    note(f"predicted{rank()}", " ".join(f"{len(out)}x{out.shape[1]}" for out in outputs))


def evaluate(fn: str, fault: Fault | None = None, batches: Any = 4, data: str = "sized", **options: Any) -> None:
    """`fn`: validate or test. Notes how many batches this rank saw."""
    module = FaultyLM(fault)
    getattr(trainer(**options), fn)(module, loader(own(batches), data), verbose=False)
    note(f"evaluated{rank()}", str(module.tested + len(module.validated)))


# -- real launchers: this process becomes one, and its ranks run `script.py`


def _launch(options: dict[str, Any], ranks: int) -> None:
    Path(os.environ["FAULT_FOLDER"], WORK).write_bytes(pickle.dumps(options))
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "MASTER_"))]:
        del os.environ[name]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        del os.environ[name]
    os.environ["FAULT_WORLD"] = str(ranks)


def under_torchrun(max_restarts: int = 0, **options: Any) -> None:
    _launch(options, 2)
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={max_restarts}"]
    os.execv(sys.executable, [sys.executable, "-m", *command, "--monitor-interval=0.1", "-m", "tests.faults.script"])


def under_lightning(**options: Any) -> None:
    """`devices=2` of the Trainer: rank 0 starts the other rank itself."""
    _launch(options, 2)
    os.execv(sys.executable, [sys.executable, "-m", "tests.faults.script"])


# -- things to do before


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
