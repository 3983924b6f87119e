"""What is refused at set-up, by all ranks and in words that say what to do; what passes through."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn

from lightning_ep import EPOverlapStrategy, consolidate_checkpoint, load_full_state_dict
from lightning_ep.rule import ConfigurationError
from tests.distributed import run_distributed
from tests.strategy.toy import (
    HIDDEN,
    Batch,
    Run,
    ToyModule,
    adamw,
    assert_replicas_equal,
    assert_trained_alike,
    loader,
    make_moe,
    make_trainer,
    train,
)


class Loose(ToyModule):
    """Trains a layer that belongs to nobody."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw([*self.parameters(), *nn.Linear(3, 3).parameters()])


class Lbfgs(ToyModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class NoLoss(ToyModule):
    def training_step(self, batches: list[Batch], batch_idx: int) -> None:
        super().training_step(batches, batch_idx)


class NoExperts(ToyModule):
    def __init__(self) -> None:
        super().__init__(nn.Linear(HIDDEN, HIDDEN))


class SevenExperts(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.net.moe[1] = make_moe(24, 7, 2)


class SparseEmbedding(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 5, sparse=True)


REFUSED = {
    SparseEmbedding: "'words' has sparse gradients",
    Loose: r"AdamW has 2 parameters that are not the LightningModule's, first of shape \(3, 3\)",
    Lbfgs: "LBFGS takes inner products over all parameters",
    NoLoss: "by returning None in distributed training is not supported",
    NoExperts: "no experts found in NoExperts",
    SevenExperts: r"num_moe_experts=1 \(common to 7 in net\.moe\.1\.experts, 8 in net\.moe\.0\.experts\)",
}


def refused(make: type[ToyModule]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        make_trainer(2, {}).fit(make(), loader(2, 2, dist.get_rank()))
    return str(error.value)


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_refused_on_all_ranks(make: type[ToyModule]) -> None:
    for message in run_distributed(refused, 2, make):
        assert re.search(REFUSED[make], message), message


class Untrained(ToyModule):
    def training_step(self, batches: list[Batch], batch_idx: int) -> None:
        raise AssertionError("trained before it was refused")


def refused_to_save(arguments: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as error:
        make_trainer(2, {}, **arguments).fit(Untrained(), loader(2, 2, dist.get_rank()))
    return str(error.value)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"default_root_dir": "memory://run"}, "checkpoint_dir='memory://run' (default_root_dir of the Trainer)"),
        (
            {"callbacks": [ModelCheckpoint("memory://run")]},
            "checkpoint_dir='memory://run' (dirpath of ModelCheckpoint)",
        ),
        ({"plugins": [AsyncCheckpointIO()]}, "checkpoint_io='AsyncCheckpointIO' (in plugins of the Trainer)"),
    ],
    ids=["default_root_dir", "dirpath", "plugin"],
)
def test_checkpoints_that_cannot_be_written_are_refused_before_training(arguments: dict, words: str) -> None:
    for message in run_distributed(refused_to_save, 2, {"enable_checkpointing": True, **arguments}):
        assert words in message and message.count("otherwise:") == 1
        assert ("on a file system that all ranks share" in message) == ("checkpoint_dir" in words)


def load_remote() -> list[str]:
    said = []
    for load in (
        lambda: make_trainer(2, {}).fit(Untrained(), loader(2, 2, dist.get_rank()), ckpt_path="memory://run/last.ckpt"),
        lambda: load_full_state_dict("memory://run/last.ckpt"),
        lambda: consolidate_checkpoint("memory://run/last.ckpt", "here.ckpt"),
    ):
        with pytest.raises(ValueError, match=r"'memory://run/last\.ckpt' is remote; use a directory") as error:
            load()
        said.append(str(error.value))
    return said


def test_remote_checkpoints_are_not_read_either() -> None:
    assert all(len(said) == 3 for said in run_distributed(load_remote, 2))


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"expert_model_paralel_size": 2}, TypeError, "'expert_model_paralel_size'; did you mean 'expert_model_parallel_size'"),
        ({"ddp_comm_hook": print}, ValueError, "ddp_comm_hook: belongs to DDP's reducer"),
        ({"model_averaging_period": 4}, ValueError, "model_averaging_period"),
        ({"timeout": timedelta(0)}, ValueError, "timeout='0:00:00' leaves no time to wait; set it to"),
        ({"expert_model_parallel_size": None}, ValueError, "expert_model_parallel_size=None is not a size"),
    ],
)  # fmt: skip
def test_arguments_that_would_do_nothing_are_refused(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        EPOverlapStrategy(**arguments)


def ddp_arguments() -> dict[str, Any]:
    options = {
        "find_unused_parameters": True, "gradient_as_bucket_view": True, "static_graph": False,
        "bucket_cap_mb": 0.001, "process_group_backend": "gloo", "broadcast_buffers": False,
    }  # fmt: skip
    return train(Run(options=options), 2, 2)


def test_ddps_own_arguments_pass_through() -> None:
    ranks = run_distributed(ddp_arguments, 2)
    assert_trained_alike(ranks, train(Run(), 2, None))
    assert_replicas_equal(ranks)
