"""The faults: what is done to which rank, and what everybody must see of it. `test_faults.py` runs them all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

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
    fast: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def failed(rank: int, what: str) -> str:
    return rf"rank {rank} failed first: {what}.*This rank was .*in (train|validate|predict|sanity_check)"


def on_one_rank(id: str, title: str, fault: Fault, what: str, **more: Any) -> Case:
    """An exception on rank 1 of two."""
    options = {"fault": fault, "timeout": LONG, **more.pop("options", {})}
    return Case(id, title, more.pop("run", ranks.fit), options, failed(1, what), (1, 1), **more)


def trained(*counts: str) -> Check:
    """Each rank's number of batches and epochs."""

    def check(folder: Path, _: list[End]) -> None:
        assert tuple((folder / f"trained{rank}").read_text() for rank in range(len(counts))) == counts

    return check


def own_error(rank: int, pattern: str) -> Check:
    def check(_: Path, ends: list[End]) -> None:
        assert re.search(pattern, ends[rank].output), ends[rank].output[-3000:]

    return check


def loads(name: str, also: Check | None = None) -> Check:
    """The checkpoint is whole, and nothing unfinished lies beside it."""

    def check(folder: Path, ends: list[End]) -> None:
        assert "model.lm_head.weight" in load_full_state_dict(folder / "checkpoints" / name)
        if also is not None:
            also(folder, ends)

    return check


def resumes(options: dict[str, Any], expected: str) -> Check:
    """`ckpt_path="last"` finds the last whole checkpoint and goes on from there."""

    def check(folder: Path, _: list[End]) -> None:
        options_ = {"timeout": LONG, "saving": EVERY_SECOND, "ckpt_path": "last", **options}
        (folder / "struck").unlink()
        with Job(_fit, 2, options_, folder=folder) as job:
            assert [end.code for end in job.wait(60)] == [0, 0], [o.read_text()[-3000:] for o in job._outputs]
        assert (folder / "trained0").read_text() == expected

    return check


def _fit(options: dict[str, Any]) -> None:
    ranks.fit(**options)


EVERY_SECOND = {"every_n_train_steps": 2, "save_last": True}
OVERLAP = {
    "strategy": {"overlap_moe_expert_parallel_comm": True},
    "accumulate_grad_batches": 3,
    "precision": "bf16-mixed",
}

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
    on_one_rank("on_exception", "exception, with `OnExceptionCheckpoint`", Fault("raise", "training_step", 3), "ValueError: boom",
        options={"on_exception": True, "saving": EVERY_SECOND},
        check=loads("last.ckpt", own_error(1, r"not saved: .*on_exception.ckpt(.|\n)*ValueError: boom")),
        kept="the last regular checkpoint; none is written by one rank alone, and the error stays visible", fast=True),
    Case("far", "exception, other ranks in other EP groups", ranks.fit,
        {"fault": Fault("raise", "training_step"), "timeout": LONG, "ep_size": 2}, failed(1, "ValueError: boom"),
        (1, 1, 1, 1), innocent=(0, 2, 3), world_size=4, within=8),
    Case("lost_router", "a router that gives expert ids out of range", ranks.fit,
        {"fault": Fault("lost", "nowhere"), "lm": ranks.LostRouter, "timeout": LONG},
        r"MoE layer 1: expert ids outside \[0, 8\) came from the router of EP ranks \{1: \d+\}", (1, 1), innocent=(0, 1)),
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
    Case("stop", "SIGSTOP", ranks.fit, {"fault": Fault("stop", "training_step"), "timeout": SHORT},
        r"rank 1 did not answer for 4 s \(pid .*stopped\).*This rank was waiting in the dispatch of MoE layer 0",
        (1, None), stopped=(1,), within=SHORT + 3, fast=True),
    Case("stop_host", "SIGSTOP of rank 0, which hosts the rendezvous", ranks.fit,
        {"fault": Fault("stop", "training_step", ranks=(0,)), "timeout": SHORT},
        r"rank 0 that hosts the rendezvous store \(pid .*stopped\) did not answer for 4 s", (None, 1), innocent=(1,),
        stopped=(0,), within=SHORT + 3),
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

UNEVEN = (
    Case("uneven", "other numbers of training batches (`uneven_data='stop'`)", ranks.fit,
        {"timeout": LONG, "batches": (5, 3)},
        "ranks have different numbers of training batches: 5 on rank 0, 3 on rank 1. Every epoch ends after 3", (0, 0),
        check=trained("3 1", "3 1"), kept="training goes on; the warning counts what is left out"),
    Case("uneven_stream", "streams of other lengths", ranks.fit, {"timeout": LONG, "batches": (3, 5), "sized": False, "max_epochs": 2},
        "rank 0 had no more than 3 training batches", (0, 0), check=trained("6 2", "6 2"),
        kept="training goes on; the warning counts what is left out"),
    Case("uneven_refused", "other numbers of training batches (`uneven_data='error'`)", ranks.fit,
        {"timeout": LONG, "batches": (5, 3), "strategy": {"uneven_data": "error"}},
        r"UnevenDataError: .*: 5 on rank 0, 3 on rank 1", (1, 1), innocent=(0, 1), kept=""),
    Case("uneven_predict", "other numbers of batches in prediction (also validation, test)", ranks.predict,
        {"timeout": LONG, "batches": (2, 5)}, "", (0, 0),
        check=lambda folder, _: _assert_equal([(folder / f"predicted{r}").read_text() for r in (0, 1)], ["2", "5"]),
        kept="every sample once, in order: a rank without batches serves its experts"),
    Case("stop_alone", "`should_stop` on one rank", ranks.fit, {"fault": Fault("stop training", "callback"), "timeout": LONG}, "",
        (0, 0), check=trained("4 1", "4 1"), kept="all ranks end one batch later"),
    Case("skip_alone", "-1 from `on_train_batch_start` on one rank", ranks.fit,
        {"fault": Fault("skip", "on_train_batch_start"), "timeout": LONG, "lm": ranks.SkippingLM}, "", (0, 0),
        check=trained("3 1", "3 1"), kept="all ranks skip the rest of the epoch, from the next batch on"),
    Case("clock", "`val_check_interval` by the clock", ranks.fit,
        {"timeout": LONG, "val_check_interval": timedelta(seconds=1), "validation": 1, "max_epochs": 3}, "", (0, 0),
        check=trained("18 3", "18 3"), kept="all ranks validate after the same batch"),
)  # fmt: skip

SAVING = (
    Case("kill_writing", "SIGKILL of a rank while a checkpoint is written", ranks.fit,
        {"fault": Fault("kill", "write", 4), "timeout": LONG, "before": ranks.dies_while_saving, "saving": EVERY_SECOND},
        r"rank 1 died", (1, -9), check=resumes({}, "4 1"), kept='the checkpoint before, found by `ckpt_path="last"`', fast=True),
    Case("kill_replacing", "SIGKILL of rank 0 before a written checkpoint is in place", ranks.fit,
        {"fault": Fault("kill", "replace", 4, (0,)), "timeout": LONG, "before": ranks.dies_while_saving, "saving": EVERY_SECOND},
        r"rank 0 died", (-9, 1), innocent=(1,), check=resumes({}, "4 1"), kept='the checkpoint before, found by `ckpt_path="last"`'),
    Case("full_disk", "a full disk on one rank", ranks.fit,
        {"fault": Fault("", "write"), "timeout": LONG, "before": ranks.full_disk, "saving": EVERY_SECOND},
        r"(No space|File too large|Errno 27|File size)", (1, 1), innocent=(0, 1), check=resumes({}, "4 1"),
        kept='the checkpoint before, found by `ckpt_path="last"`'),
)  # fmt: skip

CASES = (*EXCEPTIONS, *DEAD, *SIGNALS, *MISMATCH, *UNEVEN, *SAVING)


def _assert_equal(actual: Any, expected: Any) -> None:
    assert actual == expected, (actual, expected)


def run(case: Case, folder: Path, slack: float = 1.0) -> list[End]:
    """Run a case and check everything that it promises. `slack` multiplies the times, for a busy machine."""
    with Job(_run, case.world_size, case.run, case.options, folder=folder, **case.environment) as job:
        ends = job.wait(30 + slack * (case.within + 10), case.stopped)
        for rank in case.stopped:
            job.kill(rank)
        left = job.left_behind()
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
