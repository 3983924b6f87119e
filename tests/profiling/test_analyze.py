"""`lightning-ep analyze` as a person calls it."""

import json
import resource
import subprocess
import sys

import pytest
from PIL import Image

from lightning_ep.cli import main as lightning_ep
from lightning_ep.profiling.analyze import main
from lightning_ep.profiling.readers import read_trace
from lightning_ep.profiling.report import kernel_differences, overlap_report, pair_with_baseline
from lightning_ep.profiling.text import milliseconds, percent, rounded_down
from tests.profiling.trace_files import BASE_US, GEMM, NCCL, kineto_text, training, write_kineto, write_nsys


@pytest.fixture
def traces(tmp_path):
    """Two ranks, before and after."""
    for name, overlap in (("before", False), ("after", True)):
        kernels, spans = training(overlap)
        for rank in (0, 1):
            write_kineto(tmp_path / f"{name}{rank}.json", kernels=kernels, spans=spans, rank=rank)
    return tmp_path


def test_table_says_what_was_hidden(traces, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert lightning_ep(["analyze", str(traces / "after0.json"), "--baseline", str(traces / "before0.json")]) == 0
    out, err = capsys.readouterr()
    assert "beside GEMM and attention" in out and "(baseline)" in out
    assert "0.000 ms  0.00%" in out and "ep/dispatch" in out and "layer 3" in out
    assert not err, "the same kernels: no warning"


def test_json_has_one_object_a_trace(traces, capsys):
    assert main([str(traces / "after0.json"), str(traces / "after1.json"), "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert report["comm_ms"] == pytest.approx(report["hidden_ms"] + report["exposed_ms"])
        assert report["gpu_active_ms"] + report["idle_ms"] == pytest.approx(report["span_ms"])
        assert report["hidden_fraction"] > 0.5 and report["hidden_gemm_attention_ms"] <= report["hidden_ms"]
        assert report["kernel_count"] == 99
        assert {row["name"] for row in report["layers"]} == {f"layer {i}" for i in range(4)}


def test_baseline_is_found_by_rank(traces):
    [[after0], [after1], [before0], [before1]] = [
        read_trace(traces / f"{name}.json") for name in ("after0", "after1", "before0", "before1")
    ]
    pairs = pair_with_baseline([after0, after1], [before1, before0])
    assert [(a.rank, b.rank) for a, b in pairs] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="2 traces but 1 baselines"):
        pair_with_baseline([after0, after1], [before0])


def test_layers_sort_as_numbers(tmp_path):
    kernels, spans = training(True, layers=12)
    [table] = read_trace(write_kineto(tmp_path / "a.json", kernels=kernels, spans=spans))
    assert [row.name for row in overlap_report(table).layers] == [f"layer {i}" for i in range(12)]


def test_other_kernels_than_the_baseline_are_a_warning(traces, capsys):
    kernels, spans = training(True)
    write_kineto(traces / "less.json", kernels=[k for k in kernels if k.correlation != 1], spans=spans, rank=0)
    assert main([str(traces / "less.json"), "--baseline", str(traces / "before0.json"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "does not have the kernels of its baseline" in err and f"{GEMM} 48 -> 47" in err
    assert json.loads(out)[0]["baseline"]["hidden_ms"] == 0, "warnings stay out of the JSON"
    [[less], [before]] = [read_trace(traces / f"{name}.json") for name in ("less", "before0")]
    assert kernel_differences(before, less) == {GEMM: (48, 47)}


def test_unknown_kernels_are_shown(tmp_path, capsys):
    assert main([str(write_nsys(tmp_path / "a.sqlite"))]) == 0
    assert "unknown kernels, counted as compute: my_own_zap (1)" in capsys.readouterr().out.replace("\n", " ")


def test_plots_are_written(traces, capsys):
    out = traces / "out.png"
    before, after = str(traces / "before0.json"), str(traces / "after0.json")
    assert main([after, "--baseline", before, "--plot", str(out)]) == 0
    for path in (out, traces / "out-bars.png"):
        with Image.open(path) as image:
            assert image.width > 600 and len(image.convert("RGB").getcolors(1 << 24)) > 20
    assert str(traces / "out-bars.png") in capsys.readouterr().err


def test_plot_without_steps_or_communication(tmp_path):
    kernels = [k for k in training(False)[0] if k.name == GEMM]
    trace = write_kineto(tmp_path / "a.json", kernels=kernels, spans=[])
    assert main([str(trace), "--plot", str(tmp_path / "a.png")]) == 0


def test_unreadable_trace_is_one_line_and_exit_1(tmp_path, capsys):
    path = tmp_path / "cut.json"
    path.write_text(kineto_text()[:900])
    assert main([str(path)]) == 1
    err = capsys.readouterr().err
    assert (
        err.startswith("lightning-ep analyze: ") and "cut.json" in err and "truncated" in err and "\n" not in err[:-1]
    )


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(36.5558, 2, "36.55"), (29.0, 2, "29.00"), (100 * 0.29, 2, "29.00"), (0.11, 2, "0.11"), (-1.001, 2, "-1.01")],
)
def test_figures_are_rounded_down(value, digits, text):
    assert rounded_down(value, digits) == text


def test_published_overlap_figures():
    """9.079 ms of 8.25 s is 0.11%, 3,958.997 ms of 10.83 s is 36.55%, in the digits in which they were published."""
    assert percent(9.079 / 8250) == "0.11%"
    assert percent(3958.997 / 10830) == "36.55%"
    assert milliseconds(3958.997) == "3,958.997 ms"


@pytest.mark.slow
def test_five_million_events_within_a_minute_and_4_gb(tmp_path):
    """1 GB as Kineto writes it: two operators, a launch, a kernel and the two ends of the arrow between them."""
    path = tmp_path / "big.json"
    padding = "x" * 110
    with path.open("w") as file:
        file.write('{"distributedInfo": {"rank": 0}, "traceEvents": [\n')
        for i in range(5_000_000 // 6):
            at = f"{BASE_US + 5 * i}.125"
            name = NCCL if i % 4 == 3 else GEMM
            operator = f'"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": {at}, "dur": 2.112'
            arrow = f'"id": {i}, "ts": {at}, "cat": "ac2g", "name": "ac2g"'
            file.write(
                f'{{"name": "aten::matmul", {operator}, "args": {{"External id": {i}, "stack": "{padding}"}}}},\n'
                f'{{"name": "aten::mm", {operator}, "args": {{"External id": {i}, "stack": "{padding}"}}}},\n'
                f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": {at}, '
                f'"dur": 1.5, "args": {{"External id": {i}, "cbid": 211, "correlation": {i}}}}},\n'
                f'{{"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": 7, "ts": {at}, "dur": 4.500, "args": '
                f'{{"device": 0, "stream": {7 + i % 4}, "correlation": {i}, "grid": [4, 106, 1], "stack": "{padding}"}}}},\n'
                f'{{"ph": "s", {arrow}}},\n{{"ph": "f", {arrow}}},\n'
            )
        file.write('{"ph": "i", "name": "end"}]}\n')
    assert path.stat().st_size > 900_000_000
    command = [sys.executable, "-m", "lightning_ep", "analyze", str(path), "--json"]
    [report] = json.loads(subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE).stdout)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime < 60, "seconds of one core: the wall time of a machine that does nothing else"
    assert used.ru_maxrss < 4 << 20, "KiB"
    assert report["kernel_count"] == 833_333 and report["comm_ms"] == pytest.approx(208_333 * 0.0045)
