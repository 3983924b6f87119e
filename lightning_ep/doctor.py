"""`lightning-ep doctor [--json]`: what this machine can do.

Versions of torch, CUDA, NCCL and the optional libraries and whether they really import, GPUs, NVLink and RDMA devices,
and each dispatcher: usable, or why not. Whatever may crash (a library built for another torch) is tried in a process of
its own. The exit code is 0 when the default dispatcher, alltoall, works, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_ep import imports
from lightning_ep.flex import gpus_of, supports
from lightning_ep.libraries import LIBRARIES, Library, absent, ibgda, installed, nvcc_missing

# Importing Transformer Engine or DeepEP for the first time reads gigabytes.
PROBE_TIMEOUT = 120

_EXCHANGE = """
import torch, torch.distributed as dist
gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
sent = torch.arange(4.0, device="cuda" if gpu else "cpu")
received = torch.empty_like(sent)
dist.all_to_all_single(received, sent, [4], [4])
assert torch.equal(sent, received), "the exchange changed the data"
dist.destroy_process_group()
found = "over nccl" if gpu else "over gloo, without a GPU"
"""
_GPUS = """
import torch
every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
found = [dict(name=p.name, capability=[p.major, p.minor], memory_gib=round(p.total_memory / 2**30)) for p in every]
"""


@dataclass(frozen=True)
class Finding:
    """A library or a dispatcher: whether it can be used, its version or mode, and why not."""

    usable: bool
    found: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    versions: dict[str, str | None]
    libraries: dict[str, Finding]
    gpus: list[dict[str, Any]]
    gpu_problem: str  # "" when CUDA answered
    nvlink: str
    rdma: list[str]
    nvshmem: str
    ibgda: str
    dispatchers: dict[str, Finding]

    @property
    def ok(self) -> bool:
        return self.dispatchers["alltoall"].usable


def examine() -> Report:
    """Look at this machine; takes some seconds, for the processes in which libraries are tried."""
    with ThreadPoolExecutor(2) as pool:
        libraries = pool.map(_try_library, LIBRARIES)
        exchange, listing = pool.submit(probe, _EXCHANGE), pool.submit(probe, _GPUS)
        alltoall, (has_gpus, gpus) = Finding(*_found(exchange.result())), listing.result()
        found = {library.name: finding for library, finding in zip(LIBRARIES, libraries, strict=True)}
    gpus = gpus if has_gpus else []
    return Report(
        versions={
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "lightning": imports.version("lightning"),
            "transformers": imports.version("transformers"),
            "cuda": torch.version.cuda,
            "nccl": _nccl_version(),
        },
        libraries=found,
        gpus=gpus,
        gpu_problem="" if has_gpus else str(gpus),
        nvlink=_nvlink(),
        rdma=_rdma(),
        nvshmem=_nvshmem(),
        ibgda=ibgda(),
        dispatchers={
            "alltoall": alltoall,
            "flex + deepep": _flex("deepep", found["DeepEP"], gpus),
            "flex + hybridep": _flex("hybridep", found["HybridEP"], gpus),
        },
    )


def probe(code: str, timeout: float = PROBE_TIMEOUT) -> tuple[bool, Any]:
    """Run `code` in a process of its own.

    Returns:
        (True, what the code left in `found`), or (False, why it did not end well: exception, signal or time).
    """
    script = f"{code}\nimport json; print('\\nfound:' + json.dumps(found))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer after {timeout:g} s"
    if done.returncode < 0:
        return False, f"crashed ({signal.Signals(-done.returncode).name}): built for another torch or CUDA?"
    answers = [line for line in done.stdout.splitlines() if line.startswith("found:")]
    if done.returncode or not answers:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return False, lines[-1].strip() if lines else f"ended with exit code {done.returncode}"
    return True, json.loads(answers[-1].removeprefix("found:"))


def _found(answer: tuple[bool, Any]) -> tuple[bool, str, str]:
    works, text = answer
    return (True, str(text), "") if works else (False, "", str(text))


def _try_library(library: Library) -> Finding:
    if not imports.is_available(library.module):
        return Finding(False, "", f"{absent(library)}; {library.advice('')}")
    works, version, reason = _found(probe(library.probe))
    version = version or installed(library)
    return Finding(True, version) if works else Finding(False, version, f"{reason}; {library.advice(reason)}")


def _flex(backend: str, library: Finding, gpus: list[dict[str, Any]]) -> Finding:
    reasons = [] if library.usable else [library.reason]
    if not gpus:
        reasons.append(f"no GPU; needs {gpus_of(backend)}")
    elif wrong := [gpu["name"] for gpu in gpus if not supports(backend, gpu["name"], tuple(gpu["capability"]))]:
        reasons.append(f"{wrong[0]} does not run it; needs {gpus_of(backend)}")
    elif backend == "hybridep" and (missing := nvcc_missing()):
        reasons.append(f"{missing}, which compiles its kernels; set CUDA_HOME to the folder of CUDA")
    return Finding(not reasons, library.found, "; ".join(reasons))


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # torch built without NCCL
        return None


def _nvlink() -> str:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "nvlink", "--status"], capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown (no nvidia-smi)"
    links = re.findall(r"Link \d+: ([\d.]+) GB/s", listing)
    return f"{len(links)} links, {links[0]} GB/s each" if links else "none"


def _rdma(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """RDMA devices with the state and rate of their first port."""

    def read(path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError:
            return "?"

    devices = sorted(root.iterdir()) if root.is_dir() else []
    return [f"{device.name}: {read(device / 'ports/1/state')}, {read(device / 'ports/1/rate')}" for device in devices]


def _nvshmem() -> str:
    versions = (imports.version(f"nvidia-nvshmem-cu{major}") for major in (12, 13))
    return next((version for version in versions if version), "not found; DeepEP across nodes needs it")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lightning-ep doctor", description="What this machine can do.")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    arguments = parser.parse_args(argv)
    report = examine()
    if arguments.json:
        print(json.dumps(asdict(report) | {"ok": report.ok}, indent=2))
    else:
        _show(report)
    return 0 if report.ok else 1


def _show(report: Report) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table(title="lightning-ep doctor", title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("found")
    table.add_column("usable", no_wrap=True)
    table.add_column("why not, and what to do")
    for name, version in report.versions.items():
        table.add_row(name, version or "-", "", "")
    for name, finding in report.libraries.items():
        table.add_row(name, finding.found or "-", _mark(finding.usable), escape(finding.reason))
    table.add_section()
    for index, gpu in enumerate(report.gpus):
        capability = ".".join(map(str, gpu["capability"]))
        table.add_row(f"GPU {index}", f"{gpu['name']}, {capability}, {gpu['memory_gib']} GiB", "", "")
    if not report.gpus:
        table.add_row("GPU", "none", "", escape(report.gpu_problem))
    table.add_row("NVLink", report.nvlink, "", "")
    table.add_row("RDMA devices", "\n".join(report.rdma) or "none", "", "")
    table.add_row("NVSHMEM", report.nvshmem, "", "")
    table.add_row("IBGDA", report.ibgda, "", "")
    table.add_section()
    for name, finding in report.dispatchers.items():
        table.add_row(name, finding.found or "-", _mark(finding.usable), escape(finding.reason))
    console.print(table)
    verdict = "works" if report.ok else "does not work"
    console.print(f"The default dispatcher, alltoall, {verdict} here.", markup=False, highlight=False)


def _mark(usable: bool) -> str:
    return "[green]yes[/green]" if usable else "[red]no[/red]"


if __name__ == "__main__":
    raise SystemExit(main())
