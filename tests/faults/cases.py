"""The faults: what is done to which rank, and what everybody must see of it. `test_faults.py` runs them all."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_ep import load_full_state_dict
from tests.faults import ranks
from tests.faults.processes import End, Job
from tests.faults.ranks import Fault

# Ranks wait for each other for so long where that is what ends them, and where it must not be.
SHORT, LONG = 5, 40

Check = Callable[[Path, list[End]], None]


@dataclass(frozen=True)
class Case:
    """One fault.

    Args:
        title: of its row in the table.
        sees: pattern that every rank in `innocent` has to print.
        codes: exit code of every rank; None where it does not matter.
        within: seconds in which every rank has to end, on an idle machine.
        stopped: ranks that cannot end.
        kept: what is left, for the table; `check` has to show it.
        before: what to do in the case's folder first.
        fast: one of those that are checked every time.
    """

    id: str
    title: str
    run: Callable[..., None]
    options: dict[str, Any]
    sees: str
    codes: tuple[int | None, ...]
    innocent: tuple[int, ...] = (0,)
    world_size: int = 2
    within: float = 5
    stopped: tuple[int, ...] = ()
    kept: str = "every checkpoint written before"
    check: Check | None = None
    before: Callable[[Path], None] | None = None
    fast: bool = False


def failed(rank: int, what: str) -> str:
    return rf"rank {rank} failed first: {what}.*This rank was .*in (train|validate|predict|sanity_check)"


def on_one_rank(id: str, title: str, fault: Fault, what: str, **more: Any) -> Case:
    """An exception on rank 1 of two."""
    options = {"fault": fault, "timeout": LONG, **more.pop("options", {})}
    return Case(id, title, more.pop("run", ranks.fit), options, failed(1, what), (1, 1), **more)


def trained(*counts: str) -> Check:
    """Each rank's number of batches and epochs."""
    return noted("trained", *counts)


def both(*checks: Check) -> Check:
    def check(folder: Path, ends: list[End]) -> None:
        for each in checks:
            each(folder, ends)

    return check


def noted(name: str, *texts: str) -> Check:
    """What every rank noted under this name."""

    def check(folder: Path, _: list[End]) -> None:
        _assert_equal(tuple((folder / f"{name}{rank}").read_text() for rank in range(len(texts))), texts)

    return check


def own_error(rank: int, pattern: str) -> Check:
    def check(_: Path, ends: list[End]) -> None:
        assert re.search(pattern, ends[rank].output), ends[rank].output[-3000:]

    return check


def loads(name: str) -> Check:
    """The checkpoint is whole."""

    def check(folder: Path, _: list[End]) -> None:
        assert "model.lm_head.weight" in load_full_state_dict(folder / "checkpoints" / name)

    return check


def missing(name: str) -> Check:
    def check(folder: Path, _: list[End]) -> None:
        assert not (folder / "checkpoints" / name).exists()

    return check


def resumes(expected: str) -> Check:
    """`ckpt_path="last"` finds the last whole checkpoint and goes on from there."""

    def check(folder: Path, _: list[End]) -> None:
        (folder / "struck").unlink()
        _run_well({"timeout": LONG, "saving": EVERY_SECOND, "ckpt_path": "last"}, folder)
        assert (folder / "trained0").read_text() == expected

    return check


def _loads_any(folder: Path, _: list[End]) -> None:
    """One checkpoint is there, of whatever step."""
    (path,) = (folder / "checkpoints").iterdir()
    loads(path.name)(folder, [])


def same_curve(steps: int, options: dict[str, Any]) -> Check:
    """Losses are, bit for bit, those of a run that nothing disturbed; some steps were done twice."""

    def check(folder: Path, _: list[End]) -> None:
        (folder / "undisturbed").mkdir()
        _run_well(options, folder / "undisturbed")
        for rank in (0, 1):
            seen = (folder / f"losses{rank}").read_text().splitlines()
            expected = (folder / "undisturbed" / f"losses{rank}").read_text().splitlines()
            assert len(expected) == steps < len(seen), (seen, expected)
            assert set(seen) == set(expected) and seen[-1] == expected[-1], (seen, expected)

    return check


def _run_well(options: dict[str, Any], folder: Path) -> None:
    with Job(_fit, 2, options, folder=folder) as job:
        ends = job.wait(90)
    assert [end.code for end in ends] == [0, 0], [end.output[-3000:] for end in ends]


def _fit(options: dict[str, Any]) -> None:
    ranks.fit(**options)


EVERY_SECOND = {"every_n_train_steps": 2, "save_last": True}
OVERLAP = {
    "strategy": {"overlap_moe_expert_parallel_comm": True},
    "accumulate_grad_batches": 3,
    "precision": "bf16-mixed",
}
TWO_BATCH = {
    "strategy": {"overlap_moe_expert_parallel_comm": True, "overlap_schedule": "two_batch"},
    "precision": "bf16-mixed",
    "data": "halves",
}

BAD_ROUTING = (
    r"expert ids outside \[0, 8\), or weights that are not finite, came from the router of EP ranks \{1: \d+\}"
)

EXCEPTIONS = (
    on_one_rank("training_step", "exception in `training_step`", Fault("raise", "training_step"), "ValueError: boom",
        check=own_error(1, "ValueError: boom"), fast=True),
    on_one_rank("callback", "exception in a callback", Fault("raise", "callback"), "ValueError: boom"),
    on_one_rank("loader", "exception in the data loader", Fault("raise", "loader"), "ValueError: boom"),
    on_one_rank("loader_worker", "exception in a loader's worker process", Fault("raise", "loader"), "ValueError: Caught",
        options={"num_workers": 1}),
    on_one_rank("worker_killed", "a loader's worker process killed", Fault("kill", "loader", 3), "RuntimeError: DataLoader worker",
        options={"num_workers": 1}, within=10),
    on_one_rank("epoch_end", "exception at the end of an epoch", Fault("raise", "on_train_epoch_end", 0), "ValueError: boom",
        options={"max_epochs": 2}),
    on_one_rank("validation", "exception in `validation_step`", Fault("raise", "validation_step", 1), "ValueError: boom",
        options={"validation": 3}),
    on_one_rank("predict", "exception in `predict_step`", Fault("raise", "predict_step", 1), "ValueError: boom", run=ranks.predict),
    on_one_rank("none", "`training_step` returns None", Fault("none", "training_step"),
        "RuntimeError: Skipping the `training_step`", fast=True),
    on_one_rank("anomaly", "NaN loss with `detect_anomaly`", Fault("nan", "training_step"), "RuntimeError: Function",
        options={"detect_anomaly": True}),
    on_one_rank("memory", "out of GPU memory", Fault("out of memory", "training_step"), "OutOfMemoryError: CUDA out of memory"),
    on_one_rank("overlapped", "exception beside a parked backward (1f1b)", Fault("raise", "training_step", 4), "ValueError: boom",
        options=OVERLAP),
    on_one_rank("halved", "exception inside a halved batch (two_batch)", Fault("raise", "training_step"), "ValueError: boom",
        options=TWO_BATCH),
    on_one_rank("on_exception", "exception, with `OnExceptionCheckpoint`", Fault("raise", "training_step", 3), "ValueError: boom",
        options={"on_exception": True, "saving": EVERY_SECOND},
        check=both(loads("last.ckpt"), own_error(1, r"not saved: .*on_exception.ckpt(.|\n)*ValueError: boom")),
        kept="the last regular checkpoint; none is written by one rank alone, and the error stays visible", fast=True),
    Case("far", "exception, other ranks in other EP groups", ranks.fit,
        {"fault": Fault("raise", "training_step"), "timeout": LONG, "ep_size": 2}, failed(1, "ValueError: boom"),
        (1, 1, 1, 1), innocent=(0, 2, 3), world_size=4, within=8),
    Case("lost_router", "a router that gives expert ids out of range", ranks.fit,
        {"fault": Fault("lost", "nowhere"), "lm": ranks.LostRouter, "timeout": LONG},
        rf"MoE layer 1: {BAD_ROUTING}", (1, 1), innocent=(0, 1)),
    Case("nan_router", "NaN in a router's weights, and so in its logits", ranks.fit,
        {"fault": Fault("nan router", "batch start"), "timeout": LONG}, rf"MoE layer 1: {BAD_ROUTING}", (1, 1), innocent=(0, 1),
        check=own_error(1, "Seen here: this rank has NaN in model.model.layers.1.mlp.gate.weight"), fast=True),
    Case("nan_experts", "NaN in an expert's weights, in the last layer", ranks.fit,
        {"fault": Fault("nan experts", "batch start"), "timeout": LONG},
        r"MoE layer 0: .*Seen here: in the batch before, the output of MoE layer 1 was not finite", (1, 1), innocent=(0, 1)),
    Case("nan_saved", "NaN in weights that are about to be saved", ranks.fit,
        {"fault": Fault("nan experts", "batch start", 3), "timeout": LONG, "saving": EVERY_SECOND},
        r"step=4.ckpt is not saved: there is NaN in .*\. What was saved before is unchanged", (1, 1), innocent=(0, 1),
        check=both(loads("last.ckpt"), loads("step=2.ckpt"), missing("step=4.ckpt")), kept="the checkpoint before"),
)  # fmt: skip

DEAD = (
    Case("kill", "SIGKILL", ranks.fit, {"fault": Fault("kill", "training_step"), "timeout": LONG},
        r"rank 1 died \(pid .*This rank was waiting in the dispatch of MoE layer 0, in train batch 2", (1, -9), fast=True),
    Case("kill_host", "SIGKILL of rank 0, which hosts the rendezvous", ranks.fit,
        {"fault": Fault("kill", "training_step", ranks=(0,)), "timeout": LONG},
        r"rank 0 died \(pid .*This rank was waiting in the dispatch of MoE layer 0, in train batch 2", (-9, 1), innocent=(1,), fast=True),
    Case("kill_far", "SIGKILL, other ranks in other EP groups", ranks.fit,
        {"fault": Fault("kill", "training_step", ranks=(2,)), "timeout": LONG, "ep_size": 2},
        r"rank 2 died \(pid ", (1, 1, -9, 1), innocent=(0, 1, 3), world_size=4, within=8),
    Case("exit", "a rank leaves with `os._exit`", ranks.fit, {"fault": Fault("exit", "callback"), "timeout": LONG},
        r"rank 1 died \(pid ", (1, 3)),
    Case("kill_overlapped", "SIGKILL beside a parked backward (1f1b)", ranks.fit,
        {"fault": Fault("kill", "training_step", 4), "timeout": LONG, **OVERLAP}, r"rank 1 died \(pid ", (1, -9)),
    Case("kill_halved", "SIGKILL inside a halved batch (two_batch)", ranks.fit,
        {"fault": Fault("kill", "training_step"), "timeout": LONG, **TWO_BATCH}, r"rank 1 died \(pid ", (1, -9)),
    Case("kill_validation", "SIGKILL in validation", ranks.fit,
        {"fault": Fault("kill", "validation_step", 1), "timeout": LONG, "validation": 3},
        r"rank 1 died \(pid .*This rank was waiting in the dispatch of MoE layer 0, in validate", (1, -9)),
    Case("stop", "SIGSTOP", ranks.fit, {"fault": Fault("stop", "training_step"), "timeout": SHORT},
        r"rank 1 did not answer for 4 s \(pid .*stopped\).*This rank was waiting in the dispatch of MoE layer 0",
        (1, None), stopped=(1,), within=SHORT + 3, fast=True),
    Case("stop_host", "SIGSTOP of rank 0, which hosts the rendezvous", ranks.fit,
        {"fault": Fault("stop", "training_step", ranks=(0,)), "timeout": SHORT},
        r"rank 0 that hosts the rendezvous store \(pid .*stopped\) did not answer for 4 s", (None, 1), innocent=(1,),
        stopped=(0,), within=SHORT + 3),
    Case("stop_overlapped", "SIGSTOP beside a parked backward (1f1b)", ranks.fit,
        {"fault": Fault("stop", "training_step", 4), "timeout": SHORT, **OVERLAP},
        r"rank 1 did not answer for 4 s \(pid .*stopped\)", (1, None), stopped=(1,), within=SHORT + 3),
    Case("hang", "a rank hangs in user code", ranks.fit, {"fault": Fault("hang", "training_step"), "timeout": SHORT},
        r"rank 1 did not come within 4 s: it was computing after the backward of the dispatch of MoE layer 0, in train batch 2.*"
        r"This rank was waiting in the dispatch of MoE layer 0", (1, 1), within=SHORT + 3),
    Case("log_alone", "`log(sync_dist=True)` on one rank", ranks.fit,
        {"fault": Fault("log", "training_step"), "timeout": SHORT},
        r"rank 1 .*waiting in the reduction of a value, as of log\(sync_dist=True\)", (1, 1), within=SHORT + 3),
)  # fmt: skip

SIGNALS = (
    Case("sigterm", "SIGTERM to one rank", ranks.fit,
        {"fault": Fault("terminate", "training_step"), "timeout": LONG, "saving": {"save_on_exception": True}}, "", (0, 0),
        check=loads("step=4.ckpt"), kept="a checkpoint of the step at which all ranks ended (`save_on_exception=True`)", fast=True),
    Case("sigterm_all", "SIGTERM to all ranks", ranks.fit,
        {"fault": Fault("terminate", "training_step", ranks=(0, 1)), "timeout": LONG, "on_exception": True}, "", (0, 0),
        check=loads("on_exception.ckpt"), kept="the checkpoint of `OnExceptionCheckpoint`"),
    Case("sigint", "Ctrl-C that reaches one rank", ranks.fit,
        {"fault": Fault("interrupt", "training_step"), "timeout": LONG, "saving": {"save_on_exception": True}}, "", (1, 1),
        check=loads("step=4.ckpt"), kept="a checkpoint of the step at which all ranks ended (`save_on_exception=True`)"),
    Case("sigint_all", "Ctrl-C that reaches all ranks", ranks.fit,
        {"fault": Fault("interrupt", "training_step", ranks=(0, 1)), "timeout": LONG, "saving": {"save_on_exception": True}}, "", (1, 1),
        check=loads("step=4.ckpt"), kept="a checkpoint of the step at which all ranks ended (`save_on_exception=True`)"),
    Case("sigterm_workers", "SIGTERM with loader processes", ranks.fit,
        {"fault": Fault("terminate", "training_step", ranks=(0,)), "timeout": LONG, "num_workers": 1}, "", (0, 0)),
)  # fmt: skip

MISMATCH = (
    Case("ep_sizes", "ranks started with other EP sizes", ranks.fit_with,
        {"timeout": LONG, "differ": {"ep_size": (2, 1)}},
        r"ranks differ in their code or options(.|\n)*expert_model_parallel_size\): 2 on rank 0, 1 on rank 1", (1, 1),
        innocent=(0, 1), kept="", fast=True),
    Case("accumulation", "ranks started with other Trainer options", ranks.fit_with,
        {"timeout": LONG, "differ": {"accumulate_grad_batches": (1, 2)}},
        r"Trainer\(accumulate_grad_batches\): 1 on rank 0, 2 on rank 1", (1, 1), innocent=(0, 1), kept=""),
    Case("models", "ranks started with other models", ranks.fit_with,
        {"timeout": LONG, "differ": {"model": ({}, {"hidden_size": 64})}},
        r"ranks differ in their models(.|\n)*model.model.embed_tokens.weight: \[64, 32\] float32 on rank 0, \[64, 64\] float32 on rank 1",
        (1, 1), innocent=(0, 1), kept=""),
    Case("code", "ranks started with other states of this package", ranks.fit,
        {"timeout": LONG, "before": ranks.other_options},
        r"lightning_ep's code: [0-9a-f]{12} on rank 0, 0123456789ab on rank 1", (1, 1), innocent=(0, 1), kept=""),
)  # fmt: skip


def _as_many_batches(folder: Path, _: list[End]) -> None:
    first, second = ((folder / f"trained{rank}").read_text() for rank in (0, 1))
    assert first == second, (first, second)


SERVES = "every batch is evaluated: a rank without batches serves its experts"


def _shapes(rank: int, count: int) -> str:
    return " ".join(ranks.shape(i, rank) for i in range(count))


UNEVEN = (
    Case("uneven", "other numbers of training batches (`uneven_data='stop'`)", ranks.fit,
        {"timeout": LONG, "batches": (5, 3)},
        "ranks have different numbers of training batches: 5 on rank 0, 3 on rank 1. Every epoch ends after 3", (0, 0),
        check=trained("3 1", "3 1"), kept="training goes on; the warning counts what is left out"),
    Case("uneven_stream", "streams of other lengths", ranks.fit, {"timeout": LONG, "batches": (3, 5), "data": "stream", "max_epochs": 2},
        "rank 0 had no more than 3 training batches", (0, 0), check=trained("6 2", "6 2"),
        kept="training goes on; the warning counts what is left out"),
    Case("uneven_refused", "other numbers of training batches (`uneven_data='error'`)", ranks.fit,
        {"timeout": LONG, "batches": (5, 3), "strategy": {"uneven_data": "error"}},
        r"UnevenDataError: .*: 5 on rank 0, 3 on rank 1", (1, 1), innocent=(0, 1), kept=""),
    Case("empty", "no training batches on one rank", ranks.fit, {"timeout": LONG, "batches": (3, 0)},
        r"UnevenDataError: .*: 3 on rank 0, 0 on rank 1", (1, 1), innocent=(0, 1), kept=""),
    Case("empty_stream", "an empty stream on one rank", ranks.fit, {"timeout": LONG, "batches": (3, 0), "data": "stream"},
        r"UnevenDataError: rank 1 had no more than 0 training batches", (1, 1), innocent=(0, 1), kept=""),
    Case("shapes", "batches of other sizes, sequences of other lengths", ranks.fit, {"timeout": LONG}, "", (0, 0),
        check=trained("6 1", "6 1"), kept="training goes on"),
    Case("uneven_validation", "other numbers of batches in validation, none on one rank", ranks.fit,
        {"timeout": LONG, "validation": (4, 0)}, "", (0, 0),
        check=both(trained("6 1", "6 1"), noted("validated", "6 6 6 6", "")), kept=SERVES),
    Case("uneven_test", "other numbers of batches in a test", ranks.evaluate, {"fn": "test", "timeout": LONG, "batches": (1, 4)},
        "", (0, 0), check=noted("evaluated", "1", "4"), kept=SERVES),
    Case("empty_test", "an empty stream on one rank in a test", ranks.evaluate,
        {"fn": "test", "timeout": LONG, "batches": (0, 3), "data": "stream"}, "", (0, 0),
        check=noted("evaluated", "0", "3"), kept=SERVES),
    Case("uneven_predict", "other numbers of batches in prediction", ranks.predict,
        {"timeout": LONG, "batches": (2, 5)}, "", (0, 0), check=noted("predicted", _shapes(0, 2), _shapes(1, 5)),
        kept="every sample once, in order: a rank without batches serves its experts"),
    Case("predict_sampler", "`trainer.predict` with Lightning's own sampler, which is one short", ranks.predict,
        {"timeout": LONG, "common": 5}, "", (0, 0), check=noted("predicted", "1x4 1x6 1x8", "1x5 1x7"),
        kept="every sample once, in order"),
    Case("stop_alone", "`should_stop` on one rank", ranks.fit, {"fault": Fault("stop training", "callback"), "timeout": LONG}, "",
        (0, 0), check=trained("4 1", "4 1"), kept="all ranks end one batch later"),
    Case("skip_alone", "-1 from `on_train_batch_start` on one rank", ranks.fit,
        {"fault": Fault("skip", "on_train_batch_start"), "timeout": LONG, "lm": ranks.SkippingLM}, "", (0, 0),
        check=trained("3 1", "3 1"), kept="all ranks skip the rest of the epoch, from the next batch on"),
    Case("clock", "`val_check_interval` by the clock, one rank's first", ranks.fit,
        {"fault": Fault("clock", "callback"), "timeout": LONG, "val_check_interval": timedelta(minutes=30), "validation": 1}, "",
        (0, 0), check=both(trained("6 1", "6 1"), noted("validated", "4", "4")), kept="all ranks validate after the same batch"),
    Case("early_stopping", "`EarlyStopping` on one rank first", ranks.fit,
        {"timeout": LONG, "lm": ranks.ScoredLM, "early_stopping": True, "max_epochs": 9, "batches": 1}, "", (0, 0),
        check=trained("3 3", "3 3"), kept="all ranks stop after the same epoch"),
    Case("max_time", "`max_time` over on one rank first", ranks.fit_with,
        {"timeout": LONG, "max_epochs": -1, "differ": {"max_time": (timedelta(seconds=1), timedelta(0))}}, "", (0, 0),
        check=_as_many_batches, kept="all ranks stop after the same batch; rank 0's clock counts (Lightning's rule)"),
)  # fmt: skip

SAVING = (
    Case("kill_writing", "SIGKILL of a rank while a checkpoint is written", ranks.fit,
        {"fault": Fault("kill", "write", 4), "timeout": LONG, "before": ranks.dies_while_saving, "saving": EVERY_SECOND},
        r"rank 1 died", (1, -9), check=resumes("4 1"), kept='the checkpoint before, found by `ckpt_path="last"`', fast=True),
    Case("kill_replacing", "SIGKILL of rank 0 before a written checkpoint is in place", ranks.fit,
        {"fault": Fault("kill", "replace", 4, (0,)), "timeout": LONG, "before": ranks.dies_while_saving, "saving": EVERY_SECOND},
        r"rank 0 died", (-9, 1), innocent=(1,), check=resumes("4 1"), kept='the checkpoint before, found by `ckpt_path="last"`'),
    Case("full_disk", "a full disk on one rank", ranks.fit,
        {"fault": Fault("", "write"), "timeout": LONG, "before": ranks.full_disk, "saving": EVERY_SECOND},
        r"saving \S*last.ckpt failed, what was there before is unchanged \(rank 1: .*File too large", (1, 1), check=resumes("4 1"),
        kept='the checkpoint before, found by `ckpt_path="last"`'),
)  # fmt: skip


def _saved(folder: Path) -> Path:
    """A checkpoint of a run that ended well."""
    _run_well({"timeout": LONG, "saving": {"every_n_epochs": 1}}, folder)
    for path in folder.glob("rank*.txt"):
        path.unlink()
    return next((folder / "checkpoints").iterdir()).rename(folder / "last.ckpt")


def _truncate(folder: Path) -> None:
    path = next(_saved(folder).rglob("__0_0.distcp"))
    path.write_bytes(path.read_bytes()[:1000])


def _strip(folder: Path) -> None:
    """Of another tool: weights, and nothing that Lightning knows."""
    torch.save({"model.weight": torch.ones(2)}, folder / "last.ckpt")


class _Program:
    def __reduce__(self) -> Any:
        return shutil.copy, ("/etc/hostname", "struck")


def _program(folder: Path) -> None:
    torch.save({"state_dict": {}, "callbacks": _Program()}, folder / "last.ckpt")


def _resume(id: str, title: str, before: Callable[[Path], None], sees: str) -> Case:
    return Case(id, title, ranks.fit, {"timeout": LONG, "ckpt_path": "last.ckpt"}, sees, (1, 1), innocent=(0, 1), before=before,
        kept="")  # fmt: skip


DAMAGED = (
    _resume("truncated", "resuming from a truncated checkpoint", _truncate, r"ValueError: .*__0_0.distcp is truncated"),
    _resume(
        "foreign",
        "resuming from another tool's file",
        _strip,
        r"last.ckpt is not a checkpoint of Lightning: it has no state_dict",
    ),
    _resume("program", "resuming from a file with code in it", _program, r"last.ckpt cannot be loaded"),
)

REMEMBERED = {"data": "remembering", "batches": 8, "saving": EVERY_SECOND, "timeout": LONG}

# Launched for real: the exit code is the launcher's, and seconds include its own.
LAUNCHED = (
    Case("restart", "SIGKILL under `torchrun --max-restarts=1`", ranks.under_torchrun,
        {**REMEMBERED, "fault": Fault("kill", "training_step", 5), "max_restarts": 1, "ckpt_path": "last"}, r"rank 1 died \(pid ",
        (0,), world_size=1, within=60, check=same_curve(8, REMEMBERED),
        kept="the job starts again from the last checkpoint; its losses are bit for bit those of a run without the fault"),
    Case("torchrun_kill", "SIGKILL under torchrun", ranks.under_torchrun,
        {"fault": Fault("kill", "training_step"), "timeout": LONG}, r"rank 1 died \(pid ", (1,), world_size=1, within=15),
    Case("torchrun_sigterm", "SIGTERM to torchrun, as Slurm sends it", ranks.under_torchrun,
        {"fault": Fault("terminate parent", "training_step"), "timeout": LONG, "saving": {"save_on_exception": True}},
        "got signal: 15", (1,), world_size=1, within=15, check=_loads_any,
        kept="a checkpoint of the step at which all ranks ended (`save_on_exception=True`)"),
    Case("lightning_kill", "SIGKILL under Lightning's own launcher", ranks.under_lightning,
        {"fault": Fault("kill", "training_step"), "timeout": LONG}, r"rank 1 died \(pid ", (1,), world_size=1, within=10),
    Case("lightning_kill_host", "SIGKILL of rank 0 under Lightning's own launcher", ranks.under_lightning,
        {"fault": Fault("kill", "training_step", ranks=(0,)), "timeout": LONG}, r"rank 0 died \(pid ", (-9,), world_size=1, within=10),
    Case("lightning_sigterm", "SIGTERM to rank 0 under Lightning's own launcher", ranks.under_lightning,
        {"fault": Fault("terminate parent", "training_step"), "timeout": LONG, "saving": {"save_on_exception": True}}, "",
        (0,), world_size=1, within=10, check=_loads_any,
        kept="a checkpoint of the step at which all ranks ended (`save_on_exception=True`)"),
)  # fmt: skip

# The page's tables, by title.
TABLES = {
    "A rank raises": EXCEPTIONS,
    "A rank dies or is stuck": DEAD,
    "Signals": SIGNALS,
    "Under real launchers": LAUNCHED,
    "Ranks that differ": MISMATCH,
    "Data and control flow that differ": UNEVEN,
    "While saving": SAVING,
    "Checkpoints that cannot be trusted": DAMAGED,
}
CASES = tuple(case for cases in TABLES.values() for case in cases)


def _assert_equal(actual: Any, expected: Any) -> None:
    assert actual == expected, (actual, expected)


def run(case: Case, folder: Path, slack: float = 1.0) -> list[End]:
    """Run a case and check everything that it promises. `slack` multiplies the times, for a busy machine."""
    if case.before is not None:
        case.before(folder)
    with Job(_run, case.world_size, case.run, case.options, folder=folder) as job:
        ends = job.wait(30 + slack * (case.within + 10), case.stopped)
        for rank in case.stopped:
            job.kill(rank)
        left = job.left_behind()
        if case in LAUNCHED:  # its ranks may outlive a launcher
            ends = [replace(end, seconds=time.time() - job.began(), output=job.output(0)) for end in ends]
    shown = "\n".join(
        f"--- rank {rank}: {end.code}, {end.seconds:.1f} s\n{end.output[-6000:]}" for rank, end in enumerate(ends)
    )
    assert tuple(end.code for end in ends) == case.codes, shown
    for rank in case.innocent:
        assert re.search(case.sees, ends[rank].output), f"rank {rank} did not say {case.sees!r}\n{shown}"
    late = [rank for rank, end in enumerate(ends) if rank not in case.stopped and end.seconds > slack * case.within]
    assert not late, f"ranks {late} took longer than {case.within} s\n{shown}"
    assert not left, left
    if case.check is not None:
        case.check(folder, ends)
    return ends


def _run(run: Callable[..., None], options: dict[str, Any]) -> None:
    run(**options)
