"""What one rank decides first holds for all, at the same batch."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from tests.distributed import run_distributed
from tests.guards.runs import Seeing, _trainer, loader

LIMIT = 30
BATCHES = 8


class At(pl.Callback):
    """Does `what` at `place`, batch (or epoch) `when`, on `ranks`."""

    def __init__(self, what: str, place: str, when: int, ranks: tuple[int, ...]) -> None:
        self.what, self.place, self.when, self.here = what, place, when, dist.get_rank() in ranks

    def _at(self, place: str, now: int, trainer: pl.Trainer) -> None:
        if (place, now) != (self.place, self.when) or not self.here:
            return
        if self.what == "stop":
            trainer.should_stop = True
        elif self.what == "clock":
            trainer._last_val_time -= 3600
        else:
            os.kill(os.getpid(), getattr(signal, self.what))

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._at("batch start", batch_idx, trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._at("batch end", batch_idx, trainer)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._at("validation end", trainer.fit_loop.epoch_loop.batch_idx, trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._at("epoch end", trainer.current_epoch, trainer)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._at("train start", 0, trainer)

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._at("validation batch", batch_idx, trainer)

    def on_predict_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._at("prediction batch", batch_idx, trainer)


def fit(at: tuple, options: dict, val: int = 0) -> tuple[list[int], list[int], str]:
    """Batches trained and validated, and how it ended."""
    module = Seeing()
    trainer = _trainer(dist.get_world_size(), callbacks=[At(*at), *options.pop("callbacks", ())], **options)
    counts = [BATCHES] * dist.get_world_size()
    data = [loader("sized", counts), *([loader("sized", [val] * dist.get_world_size())] if val else [])]
    ended = "well"
    try:
        trainer.fit(module, *data)
    except BaseException as error:
        ended = type(error).__name__
    return module.seen["train"], [batch for _, batch, _ in module.seen["val"]], ended


def run(at: tuple, val: int = 0, world_size: int = 2, **options: Any) -> tuple[list[int], list[int], str]:
    """What `fit` says; the same on all ranks."""
    first, *rest = run_distributed(fit, world_size, at, options, val, timeout=LIMIT)
    assert all(other == first for other in rest), (first, rest)
    return first


def test_stopping_everywhere_is_stopping_at_once() -> None:
    assert run(("stop", "batch end", 2, (0, 1))) == ([0, 1, 2], [], "well")


@pytest.mark.parametrize("rank", [0, 1])
def test_stopping_on_one_rank_stops_all_a_batch_later(rank: int) -> None:
    assert run(("stop", "batch end", 2, (rank,)), val=1)[0] == [0, 1, 2, 3]


def test_stopping_in_other_hooks() -> None:
    trained, validated, _ = run(("stop", "validation end", 3, (1,)), val=1, val_check_interval=4)
    assert trained == [0, 1, 2, 3] and validated == [0]
    assert run(("stop", "epoch end", 0, (1,)), max_epochs=3)[0] == list(range(BATCHES))
    assert run(("stop", "train start", 0, (0,)))[0] == []


def test_accumulation_and_min_steps() -> None:
    assert run(("stop", "batch end", 3, (1,)), accumulate_grad_batches=2)[0] == [0, 1, 2, 3, 4]
    # With min_steps Lightning finishes the first epoch.
    assert run(("stop", "batch end", 1, (1,)), min_steps=6, max_epochs=3)[0] == list(range(BATCHES))


@pytest.mark.parametrize("signum, ended", [("SIGTERM", "SIGTERMException"), ("SIGINT", "SystemExit")])
def test_a_signal_to_one_rank_ends_all(signum: str, ended: str, tmp_path: Any) -> None:
    """Both end with what a checkpoint callback does on exceptions, on all ranks together."""
    checkpoints = ModelCheckpoint(tmp_path, save_on_exception=True, filename="{step}")
    options = {"callbacks": [checkpoints], "enable_checkpointing": True}
    trained, _, how = run((signum, "batch start", 2, (1,)), **options)
    assert how == ended and trained in ([0, 1, 2, 3], [0, 1, 2])
    assert (tmp_path / f"step={len(trained)}.ckpt").is_dir()


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_sigterm_in_validation(ranks: tuple[int, ...]) -> None:
    trained, validated, how = run(("SIGTERM", "validation batch", 1, ranks), val=6, val_check_interval=4)
    assert how == "SIGTERMException" and trained == [0, 1, 2, 3] and validated == [0, 1, 2]


def predict(at: tuple) -> tuple[str, bool]:
    trainer = _trainer(2, callbacks=[At(*at)])
    try:
        trainer.predict(Seeing(), loader("sized", [6, 6]))
    except BaseException as error:
        return type(error).__name__, trainer.predict_loop.batch_progress.current.completed < 6
    return "well", False


def test_sigterm_in_prediction() -> None:
    assert run_distributed(predict, 2, ("SIGTERM", "prediction batch", 1, (1,))) == [("SIGTERMException", True)] * 2


def test_validation_by_the_clock() -> None:
    """One rank's clock says that it is time; all validate after the same batch, once."""
    trained, validated, how = run(("clock", "batch start", 2, (1,)), val=2, val_check_interval=timedelta(minutes=30))
    assert (len(trained), validated, how) == (BATCHES, [0, 1], "well")


class Skipping(Seeing):
    def __init__(self, when: int, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.when, self.ranks = when, ranks

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.when and dist.get_rank() in self.ranks else None


def skip(when: int, ranks: tuple[int, ...]) -> list[int]:
    module = Skipping(when, ranks)
    _trainer(2, max_epochs=2).fit(module, loader("sized", [BATCHES] * 2))
    assert "on_train_batch_start" not in vars(module)
    return module.seen["train"]


def test_skipping_the_rest_of_an_epoch() -> None:
    """By all ranks: as Lightning does. By one: with the next batch, and not into the next epoch."""
    assert run_distributed(skip, 2, 2, (0, 1), timeout=LIMIT) == [[0, 1, 0, 1]] * 2
    assert run_distributed(skip, 2, 2, (1,), timeout=LIMIT) == [[0, 1, 2, 0, 1, 2]] * 2
    last = BATCHES - 1
    assert run_distributed(skip, 2, last, (1,), timeout=LIMIT) == [[*range(BATCHES), *range(BATCHES)]] * 2


class Scored(Seeing):
    def on_train_epoch_end(self) -> None:
        # Better and better on rank 0, constant on rank 1.
        self.log("score", float(self.trainer.current_epoch if dist.get_rank() == 0 else 1))


def stop_early() -> tuple[int, int]:
    stopper = EarlyStopping("score", mode="max", patience=2, check_on_train_epoch_end=True)
    trainer = _trainer(2, max_epochs=9, callbacks=[stopper])
    trainer.fit(Scored(), loader("sized", [1, 1]))
    return trainer.current_epoch, stopper.stopped_epoch


def test_early_stopping_seen_by_one_rank() -> None:
    assert run_distributed(stop_early, 2, timeout=LIMIT) == [(3, 2)] * 2


def run_out_of_time() -> int:
    """Rank 1's time is up at once; rank 0's clock counts (Lightning's rule)."""
    trainer = _trainer(2, max_epochs=-1, max_time=timedelta(seconds=1 if dist.get_rank() == 0 else 0))
    module = Seeing()
    trainer.fit(module, loader("sized", [2, 2]))
    return len(module.seen["train"])


def test_max_time() -> None:
    first, second = run_distributed(run_out_of_time, 2, timeout=LIMIT)
    assert first == second > 1
