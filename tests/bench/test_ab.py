"""The A/B harness, against runs that take no time, and its command lines against the real LightningCLI."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from PIL import Image

import lightning_ep.recipes  # noqa: F401  bare class names in configs
from lightning_ep.bench import plots
from lightning_ep.bench.ab import compare, main
from lightning_ep.bench.child import RunFailed, run_child
from lightning_ep.bench.plan import Plan, cases_of, parse_a2a_overlap, parse_steady, parse_vary
from lightning_ep.bench.report import CaseResult
from tests.profiling.trace_files import training, write_kineto

ROOT = Path(__file__).parents[2]
FAKE = (sys.executable, str(Path(__file__).with_name("fake_run.py")))
OVERLAP = "overlap_moe_expert_parallel_comm"
CONFIG = str(ROOT / "configs" / "demo_cpu.yaml")


def plan(*vary: str, extra: tuple[str, ...] = (), program: tuple[str, ...] = FAKE, **kwargs) -> Plan:
    options = dict(configs=(CONFIG,), first=3, last=6, repeats=2, seed=5, profile=True)
    return Plan(cases=cases_of([parse_vary(v) for v in vary]), extra=extra, program=program, **options | kwargs)


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_a_whole_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert compare(plan(f"{OVERLAP}=false,true"), tmp_path, "the command") == 0
    report = report_of(tmp_path)
    off, on = report["cases"]
    assert off["step_seconds"] == [[1.5] * 4, [1.51] * 4] and on["step_seconds"] == [[1.0] * 4, [1.01] * 4]
    assert (off["parity"], on["parity"]) == ("baseline", "equal")
    assert (off["hidden_fraction"], on["hidden_fraction"]) == (0.001, 0.8)
    assert on["tflops_per_gpu"] == pytest.approx(4e14 / 1.005 / 2 / 1e12)
    assert report["comparisons"][0]["verdict"] == "gain"
    assert report["conditions"]["hardware"] == "2 x H200" and report["conditions"]["command"] == "`the command`"
    text = (tmp_path / "report.md").read_text()
    assert "1.497x" in text and "80.00%" in text and "![" in text
    out = capsys.readouterr().out
    assert "a gain" in out and "1.497x" in out
    with Image.open(tmp_path / "steps.png") as image:
        assert image.width > 400
    logs = {path.parent.name for path in tmp_path.glob("*/run.log")}
    assert logs == {f"0{case}-{what}" for case in (0, 1) for what in ("repeat0", "repeat1", "profile")}


def test_runs_alternate_and_only_the_variation_differs(tmp_path):
    p = plan(f"{OVERLAP}=false,true", extra=("--trainer.devices=2",))
    assert [(repeat, p.cases.index(case)) for repeat, case in p.order()] == [(0, 0), (0, 1), (1, 1), (1, 0)]
    first, second = (p.command(case, tmp_path) for case in p.cases)
    assert {a for a in first if a not in second} == {f"--trainer.strategy.init_args.{OVERLAP}=false"}
    assert "--seed_everything=5" in first and "--trainer.devices=2" in first and "--trainer.max_steps=6" in first


def test_a_refused_combination_is_reported_and_not_repeated(tmp_path):
    assert compare(plan(f"{OVERLAP}=false,true", "delay_wgrad_compute=false,true"), tmp_path) == 0
    cases = {case["name"]: case for case in report_of(tmp_path)["cases"]}
    refused = cases[f"{OVERLAP}=false, delay_wgrad_compute=true"]
    assert "exit code 1" in refused["failure"] and "delay_wgrad_compute needs" in refused["failure"]
    assert not (tmp_path / "01-repeat1").exists() and not (tmp_path / "01-profile").exists()
    assert len(cases) == 4 and cases[f"{OVERLAP}=true, delay_wgrad_compute=true"]["step_seconds"]
    # 1 ms less, with repeats 10 ms apart.
    assert report_of(tmp_path)["comparisons"][-1]["verdict"] == "inside the spread"


def test_parity_is_judged(tmp_path):
    extra = ("--bad_at=4",)
    assert compare(plan(f"{OVERLAP}=true", "delay_wgrad_compute=false,true", extra=extra, profile=False), tmp_path) == 0
    assert report_of(tmp_path)["cases"][1]["parity"].startswith("DIVERGED at step 4: loss")


def test_ctrl_c_leaves_what_is_done_and_no_process(tmp_path):
    case = f"Case('{OVERLAP}=%s', (('trainer.strategy.init_args.{OVERLAP}', '%s'),))"
    script = (
        "import sys; from pathlib import Path; from lightning_ep.bench.ab import compare\n"
        "from lightning_ep.bench.plan import Case, Plan\n"
        f"cases = ({case % (('false',) * 2)}, {case % (('true',) * 2)})\n"
        f"plan = Plan(({CONFIG!r},), cases, 3, 6, 3, 5, True, ('--sleep=0.2',), {FAKE!r})\n"
        f"sys.exit(compare(plan, Path({str(tmp_path)!r})))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    running = tmp_path / "01-repeat0" / "steps.json.progress"
    deadline = time.monotonic() + 90
    while not running.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int((running.parent / "pid").read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    report = report_of(tmp_path)
    assert report["cases"][0]["step_seconds"] == [[1.5] * 4] and not report["cases"][1]["step_seconds"]
    assert "interrupted" in report["conditions"] and "not run" in (tmp_path / "report.md").read_text()
    process.stdout.close()
    process.stderr.close()


def test_report_is_readable_after_every_run(tmp_path, monkeypatch):
    """Killed without a chance to clean up, the report has all runs that ended."""
    seen = []
    from lightning_ep.bench import ab

    monkeypatch.setattr(
        ab, "run_child", lambda *a, **k: (run_child(*a, **k), seen.append((tmp_path / "report.md").exists()))
    )
    assert compare(plan(f"{OVERLAP}=false,true", profile=False), tmp_path) == 0
    assert seen == [False, True, True, True]


def test_nothing_measured_is_exit_1(tmp_path):
    assert compare(plan("delay_wgrad_compute=true", f"{OVERLAP}=false"), tmp_path) == 1
    assert "no result" in (tmp_path / "report.md").read_text()


def test_child_that_hangs_is_ended_with_its_children(tmp_path):
    script = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    )
    script += "open(sys.argv[1], 'w').write(str(p.pid)); time.sleep(60)"
    pid = tmp_path / "pid"
    with pytest.raises(RunFailed, match="no end after 2 s"):
        run_child(
            [sys.executable, "-c", script, str(pid)], tmp_path / "log", tmp_path / "p", lambda step: None, timeout=2
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_child_reports_steps_and_last_words(tmp_path):
    script = "import sys, time\nfor i in (1, 2): open(sys.argv[1], 'w').write(str(i)); time.sleep(0.5)\nsys.exit('out of memory')"
    steps = []
    with pytest.raises(RunFailed, match="exit code 1: out of memory"):
        run_child([sys.executable, "-c", script, str(tmp_path / "p")], tmp_path / "log", tmp_path / "p", steps.append)
    assert steps == [1, 2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to compare"),
        (["--vary", "overlap"], "write KEY=VALUE"),
        (["--vary", "a=1,"], "write KEY=VALUE"),
        (["--vary", "a=1", "--steady", "5-9"], "write FIRST:LAST"),
        (["--vary", "a=1", "--steady", "1:9"], "2 <= FIRST < LAST"),
        (["--vary", "a=1", "--repeats", "0"], "--repeats 0"),
        (["--moe_a2a_overlap", "maybe"], "write true, false"),
        (["--vary", "a=1", "--config", "missing.yaml"], "missing.yaml: no such file"),
        (["--vary", "a=1", "--out", str(ROOT)], "is not empty"),
    ],
)
def test_wrong_arguments(argv, message, capsys):
    assert main(["--config", CONFIG, *argv]) == 2
    assert message in capsys.readouterr().err


def test_a2a_overlap_sets_both_and_warns_in_its_help(capsys):
    settings = dict(cases_of([parse_a2a_overlap("true")])[0].overrides)
    assert {key.rpartition(".")[2]: value for key, value in settings.items()} == {
        OVERLAP: "true",
        "delay_wgrad_compute": "true",
    }
    # What is varied by name wins: the way to isolate one of them.
    case = cases_of([parse_a2a_overlap("true"), parse_vary("delay_wgrad_compute=false")])[0]
    assert dict(case.overrides)["trainer.strategy.init_args.delay_wgrad_compute"] == "false"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "do not use it to isolate" in " ".join(capsys.readouterr().out.split())


def test_launched_by_something_else(tmp_path):
    launch = " ".join(FAKE)
    argv = [
        "--config",
        CONFIG,
        "--vary",
        f"{OVERLAP}=true",
        "--steady",
        "2:4",
        "--repeats",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert main([*argv, "--no-profile", "--launch", launch]) == 0
    assert report_of(tmp_path)["cases"][0]["step_seconds"] == [[9.0, 1.0, 1.0]]
    assert not (tmp_path / "00-profile").exists()


def test_steady_window():
    assert parse_steady("5:20") == (5, 20)


@pytest.mark.parametrize("profiled", [False, True])
def test_lightning_cli_understands_the_command_line(tmp_path, profiled):
    [case] = cases_of([parse_vary("moe_dispatch_dedup=false"), parse_vary("trainer.accumulate_grad_batches=2")])
    command = plan("a=1").command(case, tmp_path, profiled)
    cli = LightningCLI(args=command[len(FAKE) + 1 :], run=False, save_config_callback=None)
    trainer = cli.trainer
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert {"StepRecorder", "LossParity"} <= set(names) and ("OverlapMetrics" in names) == profiled
    assert trainer.max_steps == 6 and trainer.accumulate_grad_batches == 2 and not trainer.loggers
    assert not trainer.strategy.config.moe_dispatch_dedup
    parity = next(c for c in trainer.callbacks if type(c).__name__ == "LossParity")
    assert parity.path == str(tmp_path / "losses.jsonl") and parity.flush_every == 6


def test_plots_of_traces(tmp_path):
    traces = {}
    for overlap in (False, True):
        kernels, spans = training(overlap)
        path = tmp_path / f"{overlap}.json"
        traces[f"{OVERLAP}={overlap}".lower()] = write_kineto(path, kernels=kernels, spans=spans)
    plots.plot_traces(traces, tmp_path)
    for name in ("timeline.png", "breakdown.png"):
        with Image.open(tmp_path / name) as image:
            assert image.width > 400
    plots.plot_steps([CaseResult("one", [[1.0, 1.2]])], tmp_path / "steps.png")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_runs(tmp_path):
    """Two ranks, overlap off and on: equal losses, more between launch and wait."""
    argv = [
        "--config",
        CONFIG,
        "--vary",
        f"{OVERLAP}=false,true",
        "--steady",
        "2:5",
        "--repeats",
        "2",
        "--out",
        str(tmp_path),
    ]
    small = ("precision=bf16-mixed", "accumulate_grad_batches=4")
    assert main([*argv, "--", *(f"--trainer.{s}" for s in small), "--model.config.num_hidden_layers=2"]) == 0
    off, on = report_of(tmp_path)["cases"]
    assert [len(repeat) for repeat in on["step_seconds"]] == [4, 4] and on["parity"] == "equal"
    assert on["hidden_fraction"] > off["hidden_fraction"] and on["tflops_per_gpu"] > 0
