"""OverlapMetrics: on CPU as it is, and its GPU path with a profiler that hands over a trace with known answers."""

import csv
import gzip
import json
import math
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_ep import EPOverlapStrategy
from lightning_ep.callbacks import OverlapMetrics, overlap_metrics
from lightning_ep.callbacks.host_exchanges import HostExchanges
from lightning_ep.callbacks.step_clock import StepClock, tokens_of
from lightning_ep.dispatch.base import exchange_observers
from lightning_ep.profiling.analyze import main as analyze
from tests.callbacks.training import STEPS, Regression, fit
from tests.distributed import run_distributed
from tests.profiling.trace_files import training, write_kineto
from tests.reference import tiny_model
from tests.trained import CausalLM, loader, quiet_trainer

WINDOW = dict(wait=2, warmup=1, active=2)


class FakeProfiler:
    """Counts like torch's, with one trace to hand over: two steps of `training`."""

    made: list["FakeProfiler"] = []  # noqa: RUF012

    def __init__(self, activities, schedule, on_trace_ready, **kwargs) -> None:
        self.actions, self.on_trace_ready, self.started = schedule, on_trace_ready, False
        self.step_num, self.at_steps = 0, []
        self.made.append(self)

    def start(self) -> None:
        self.started = True

    def step(self) -> None:
        action = self.actions(self.step_num)
        self.at_steps.append(str(action).rpartition(".")[2])
        self.step_num += 1
        if action == torch.profiler.ProfilerAction.RECORD_AND_SAVE:
            self.on_trace_ready(self)

    def export_chrome_trace(self, path: str) -> None:
        kernels, spans = training(overlap=True, steps=2)
        write_kineto(Path(path), kernels=kernels, spans=spans, rank=0)

    def stop(self) -> None:
        self.started = False


@pytest.fixture
def gpu(monkeypatch):
    FakeProfiler.made.clear()
    monkeypatch.setattr(torch.profiler, "profile", FakeProfiler)
    monkeypatch.setattr(overlap_metrics, "_sees_no_kernels", lambda device: False)


def rows(root) -> list[dict[str, float]]:
    with open(root / "logs" / "metrics.csv") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def logging_fit(root, *callbacks, **kwargs) -> pl.Trainer:
    logger = CSVLogger(root, "", "logs")
    return fit(root, *callbacks, logger=logger, **{"log_every_n_steps": 2, "max_steps": 12, **kwargs})


def test_window_is_profiled_logged_and_written(tmp_path, gpu):
    metrics = OverlapMetrics(**WINDOW)
    trainer = logging_fit(tmp_path, metrics)
    [profiler] = FakeProfiler.made
    assert profiler.at_steps == ["WARMUP", "RECORD", "RECORD_AND_SAVE"] and not profiler.started
    [window] = [row for row in rows(tmp_path) if "ep_overlap/comm_ms" in row]
    assert window["ep_overlap/comm_ms"] == pytest.approx(1.2), "8 exchanges of 150 us a step"
    assert window["ep_overlap/hidden_ms"] + window["ep_overlap/exposed_ms"] == pytest.approx(1.2)
    assert window["ep_overlap/hidden_fraction"] == pytest.approx(window["ep_overlap/hidden_ms"] / 1.2) and (
        window["ep_overlap/hidden_fraction"] > 0.5
    )
    assert window["ep_overlap/gpu_active_ms"] > 1.2
    assert trainer.callback_metrics["ep_overlap/hidden_fraction"] == pytest.approx(window["ep_overlap/hidden_fraction"])
    report = json.loads((tmp_path / "logs" / "ep_overlap-rank0000.json").read_text())
    assert report["steps"] == [4, 5] and report["source"].startswith("GPU") and report["global_rank"] == 0
    assert report["comm_ms"] == pytest.approx(2.4) and report["layers"]
    assert report["outside_window"]["steps"] == 1 + 6, "2 before and 7 after the window, each without its first"
    assert analyze([str(tmp_path / "logs" / "ep_overlap-rank0000.pt.trace.json.gz"), "--json"]) == 0


def test_steps_outside_the_window_are_timed(tmp_path, gpu):
    class Slow(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            time.sleep(0.2 if 3 <= batch_idx < 6 else 0.01)

    logging_fit(tmp_path, OverlapMetrics(**WINDOW), Slow())
    times = [row["ep_overlap/step_ms"] for row in rows(tmp_path) if "ep_overlap/step_ms" in row]
    assert len(times) >= 4 and all(10 <= t < 150 for t in times), "neither the window's steps nor those beside it"
    assert all(row["ep_overlap/peak_memory_gib"] > 0 for row in rows(tmp_path) if "ep_overlap/step_ms" in row)


def test_window_counts_optimizer_steps(tmp_path, gpu):
    logging_fit(tmp_path, OverlapMetrics(**WINDOW), accumulate_grad_batches=3)
    assert FakeProfiler.made[0].step_num == 3


def test_results_stay_the_same(tmp_path):
    def weights(*callbacks):
        module = Regression()
        fit(tmp_path, *callbacks, module=module)
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    assert torch.equal(weights(), weights(OverlapMetrics(wait=0, warmup=0, active=3, dirpath=str(tmp_path))))


def test_window_that_is_not_reached_is_said(tmp_path, gpu):
    with pytest.warns(UserWarning, match=f"ended after {STEPS} steps, its window after step 23"):
        fit(tmp_path, OverlapMetrics(wait=20, warmup=1, active=2))
    assert not FakeProfiler.made
    with pytest.warns(UserWarning, match="ended after 8 steps"):
        fit(tmp_path, OverlapMetrics(wait=6, warmup=1, active=5))
    assert not FakeProfiler.made[0].started and not list(tmp_path.glob("ep_overlap*"))


def test_window_that_ends_with_training_is_logged(tmp_path, gpu):
    logging_fit(tmp_path, OverlapMetrics(wait=9, warmup=1, active=2))
    assert [row for row in rows(tmp_path) if "ep_overlap/hidden_ms" in row]


def test_exception_stops_the_profiler(tmp_path, gpu):
    class Fails(Regression):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError, match="mine"):
        fit(tmp_path, OverlapMetrics(**WINDOW), module=Fails())
    assert not FakeProfiler.made[0].started
    assert not exchange_observers


def test_unusable_trace_is_said_and_training_goes_on(tmp_path, gpu, monkeypatch, capsys):
    monkeypatch.setattr(FakeProfiler, "export_chrome_trace", lambda self, path: Path(path).write_text("{"))
    trainer = logging_fit(tmp_path, OverlapMetrics(**WINDOW))
    assert trainer.global_step == 12 and "truncated" in capsys.readouterr().err
    assert not any("ep_overlap/comm_ms" in row for row in rows(tmp_path))


def test_trace_need_not_be_kept(tmp_path, gpu):
    logging_fit(tmp_path, OverlapMetrics(**WINDOW, save_trace=False))
    assert [p.name for p in (tmp_path / "logs").glob("ep_overlap*")] == ["ep_overlap-rank0000.json"]


def test_hook_outside_the_window_is_cheap(tmp_path):
    """0.5% of a step of 20 ms is 100 us."""
    costs = []

    class Timed(OverlapMetrics):
        def on_train_batch_end(self, *args):
            began = time.perf_counter()
            super().on_train_batch_end(*args)
            costs.append(time.perf_counter() - began)

    fit(tmp_path, Timed(wait=1000), max_steps=60)
    assert sorted(costs)[len(costs) // 2] < 100e-6


def _moe(root: str, overlap: bool) -> tuple[dict, dict | None]:
    metrics = OverlapMetrics(wait=1, warmup=1, active=2, ranks=[1], dirpath=root)
    trainer = quiet_trainer(
        strategy=EPOverlapStrategy(2, overlap_moe_expert_parallel_comm=overlap), precision="bf16-mixed",
        accumulate_grad_batches=4, use_distributed_sampler=False, callbacks=[metrics], log_every_n_steps=2,
    )  # fmt: skip
    trainer.fit(CausalLM(tiny_model("qwen3_moe")), loader(6, 4))
    assert not exchange_observers
    logged = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("ep_overlap/")}
    return logged, metrics.report


def test_launch_to_wait_on_the_host(tmp_path):
    """Two ranks over gloo, rank 1 profiled: with overlap more lies between launch and wait; keys equal on all ranks."""
    fractions = {}
    for overlap in (False, True):
        (first, no_report), (second, report) = run_distributed(_moe, 2, str(tmp_path), overlap)
        assert no_report is None and report["source"].startswith("host")
        assert first.keys() == second.keys() and "ep_overlap/tflops_per_gpu" in first
        assert first["ep_overlap/hidden_fraction"] == second["ep_overlap/hidden_fraction"]
        assert first["ep_overlap/tokens_per_second"] > 0
        legs = {row["name"]: row["exchange_count"] for row in report["ranges"]}
        layers = len(report["layers"])
        assert legs == dict.fromkeys(("ep/dispatch", "ep/combine", "ep/dispatch_bwd", "ep/combine_bwd"), 2 * 4 * layers)
        fractions[overlap] = first["ep_overlap/hidden_fraction"]
        assert [p.name for p in tmp_path.glob("ep_overlap*")] == ["ep_overlap-rank0001.json"]
    assert fractions[True] > fractions[False]


def test_host_exchanges_by_hand():
    exchanges = HostExchanges()
    #                              launched, wait began, wait ended
    exchanges("dispatch", 0, 10.0, 10.003, 10.004)
    exchanges("combine", 0, 10.002, 10.005, 10.007)
    exchanges("dispatch_bwd", 1, 10.020, 10.020, 10.021)
    report = exchanges.report()
    assert report["comm_ms"] == pytest.approx(7 + 1) and report["hidden_ms"] == pytest.approx(5)
    assert report["exposed_ms"] == pytest.approx(3) and report["hidden_fraction"] == pytest.approx(5 / 8)
    assert [(row["name"], row["exchange_count"]) for row in report["layers"]] == [("layer 0", 2), ("layer 1", 1)]
    assert HostExchanges().report()["hidden_fraction"] is None


def test_no_communication_is_nan(tmp_path):
    trainer = logging_fit(tmp_path, OverlapMetrics(**WINDOW))
    assert math.isnan(trainer.callback_metrics["ep_overlap/hidden_fraction"])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(2, 8, dtype=torch.int64), (16, 8)),
        ({"input_ids": torch.zeros(3, 4, dtype=torch.int64), "x": torch.zeros(9, 9, dtype=torch.int64)}, (12, 4)),
        ({"pixels": torch.zeros(2, 3), "text": torch.zeros(1, 5, dtype=torch.int32)}, (5, 5)),
        ((torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2)), (16, 8)),
        (torch.zeros(2, 8), None),
        ("text", None),
    ],
)
def test_tokens_of_a_batch(batch, expected):
    assert tokens_of(batch) == expected


def test_step_clock():
    clock = StepClock(torch.device("cpu"))
    for _ in range(3):
        clock.tick()
        time.sleep(0.002)
    clock.pause()
    time.sleep(0.05)
    clock.tick()
    clock.tick()
    times = clock.take()
    assert len(times) == 3 and min(times[:2]) >= 0.002 and times[2] < 0.002 and clock.take() == []


@pytest.mark.parametrize("wrong", [{"wait": -1}, {"warmup": -1}, {"active": 0}])
def test_wrong_arguments(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OverlapMetrics(**wrong)


def test_trace_is_a_gzip(tmp_path, gpu):
    logging_fit(tmp_path, OverlapMetrics(**WINDOW, dirpath=str(tmp_path / "there")))
    with gzip.open(tmp_path / "there" / "ep_overlap-rank0000.pt.trace.json.gz") as file:
        assert json.load(file)["traceEvents"]
