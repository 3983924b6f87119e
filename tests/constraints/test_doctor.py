"""`lightning-ep doctor`: libraries that are absent, work, fail to import or crash; and what follows for dispatchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_ep import doctor
from lightning_ep.doctor import LIBRARIES, Finding, examine, main, probe
from lightning_ep.flex import gpus_of
from lightning_ep.libraries import ibgda

DEEPEP = next(library for library in LIBRARIES if library.name == "DeepEP")
HYBRIDEP = next(library for library in LIBRARIES if library.name == "HybridEP")
H100 = {"name": "NVIDIA H100", "capability": [9, 0], "memory_gib": 80}
GB200 = {"name": "NVIDIA GB200", "capability": [10, 0], "memory_gib": 186}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a module deep_ep with the given source."""

    def install(source: str) -> None:
        (tmp_path / "deep_ep.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_a_library_that_works(library) -> None:
    library("__version__ = '1.2.1'\nclass Buffer: pass\n")
    assert doctor._try_library(DEEPEP) == Finding(True, "1.2.1")
    hybrid = doctor._try_library(HYBRIDEP)
    assert not hybrid.usable and "HybridEPBuffer" in hybrid.reason and "branch hybrid-ep" in hybrid.reason


def test_a_library_that_is_absent() -> None:
    found = doctor._try_library(DEEPEP)
    assert found == Finding(False, "", "no module deep_ep in this environment; pip install 'lightning-ep[deepep]'")


def test_a_library_built_for_another_torch(library) -> None:
    library("raise ImportError('undefined symbol: _ZN3c104cuda')")
    found = doctor._try_library(DEEPEP)
    assert not found.usable and "undefined symbol: _ZN3c104cuda" in found.reason and "pip install" in found.reason


def test_a_library_that_takes_its_process_down(library) -> None:
    library("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    found = doctor._try_library(DEEPEP)
    assert not found.usable and "crashed (SIGSEGV): built for another torch or CUDA?" in found.reason


def test_a_probe_that_never_ends() -> None:
    assert probe("import time; time.sleep(60)", timeout=1) == (False, "no answer after 1 s")


def test_a_probe_that_ends_early() -> None:
    assert probe("raise SystemExit(3)") == (False, "ended with exit code 3")
    assert probe("print('noise'); found = [1, 'a']") == (True, [1, "a"])


@pytest.mark.parametrize(
    ("backend", "gpus", "works", "usable", "reason"),
    [
        ("deepep", [H100, H100], True, True, ""),
        ("hybridep", [GB200], True, True, ""),
        ("deepep", [H100, GB200], True, False, f"NVIDIA GB200 does not run it; needs {gpus_of('deepep')}"),
        ("deepep", [], True, False, f"no GPU; needs {gpus_of('deepep')}"),
        ("deepep", [H100], False, False, "broken"),
    ],
)
def test_a_backend_needs_library_and_gpu(
    backend: str, gpus: list, works: bool, usable: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "nvcc_missing", lambda: "")
    finding = Finding(True, "1.2.1") if works else Finding(False, "1.2.1", "broken")
    assert doctor._flex(backend, finding, gpus) == Finding(usable, "1.2.1", reason)


def test_hybridep_needs_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    found = doctor._flex("hybridep", Finding(True, "1.2.1"), [GB200])
    assert not found.usable and "CUDA_HOME=/nowhere has no bin/nvcc" in found.reason
    assert doctor._flex("deepep", Finding(True, "1.2.1"), [H100]).usable


def test_devices_of_the_kernel(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert doctor._rdma(tmp_path) == ["mlx5_0: 4: ACTIVE, 400 Gb/sec (4X NDR)"]
    assert doctor._rdma(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ('EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n', True),
        ('EnableStreamMemOPs: 0\nRegistryDwords: ""\n', False),
    ],
)
def test_ibgda(text: str, on: bool, tmp_path: Path) -> None:
    (tmp_path / "params").write_text(text)
    assert (ibgda(tmp_path / "params") == "on") == on
    assert ibgda(tmp_path / "none").startswith("unknown")


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report = examine()
    assert report.ok, report.dispatchers
    assert report.dispatchers["alltoall"].usable
    doctor._show(report)
    table = capsys.readouterr().out
    for word in ("torch", "nccl", "Transformer Engine", "HybridEP", "NVLink", "RDMA", "alltoall", "flex + deepep"):
        assert word in table


@pytest.mark.parametrize("works", [True, False])
def test_the_exit_code_is_the_default_dispatchers(
    works: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {
        doctor._EXCHANGE: (works, "over gloo" if works else "RuntimeError: no interface"),
        doctor._GPUS: (True, []),
    }
    monkeypatch.setattr(doctor, "probe", lambda code, timeout=0: answers.get(code, (True, "1.0")))
    assert main(["--json"]) == (0 if works else 1)
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == works
    assert answer["dispatchers"]["alltoall"]["reason"] == ("" if works else "RuntimeError: no interface")
    assert main([]) == (0 if works else 1)
    assert f"alltoall, {'works' if works else 'does not work'} here" in capsys.readouterr().out
