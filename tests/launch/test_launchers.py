"""fit, validate, test and predict under every launcher that Lightning knows: the same numbers from each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
JOB = str(ROOT / "tests" / "launch" / "job.py")
LIMIT = 150
# What a launcher or this test run itself may have set.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "SLURM", "NODE_RANK", "PL_")


def run_all(*commands: list[str], cwd: Path = ROOT, **environments: dict[str, str]) -> list[str]:
    """Run commands side by side to their end, the i-th with `env<i>` added; their outputs, once all ended well."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            command,
            cwd=cwd,
            env=clean | environments.get(f"env{i}", {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for i, command in enumerate(commands)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, f"{process.args} ended with {process.returncode}:\n{output[-4000:]}"
    return outputs


def result(outputs: list[str]) -> dict[str, Any]:
    (line,) = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@cache
def lightnings_own() -> dict[str, Any]:
    return result(run_all([sys.executable, JOB]))


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


def assert_as_lightnings_own(found: dict[str, Any], environment: str, num_nodes: int = 1) -> None:
    assert (found["environment"], found["num_nodes"]) == (environment, num_nodes)
    assert (found["world_size"], found["ep_size"], found["local_experts"]) == (2, 2, 2)
    assert found["losses"] == lightnings_own()["losses"]
    assert found["predictions"] == lightnings_own()["predictions"]


def test_lightnings_own_launcher() -> None:
    found = lightnings_own()
    assert_as_lightnings_own(found, "LightningEnvironment")
    before, trained, after, tested = found["losses"]
    assert after < before and trained < before and tested == after
    assert len(found["predictions"]) == 8  # rank 0's half


def test_torchrun() -> None:
    command = torchrun("--standalone", "--nproc-per-node=2", JOB)
    assert_as_lightnings_own(result(run_all(command)), "TorchElasticEnvironment")


@pytest.mark.slow
def test_two_torchrun_agents_as_two_nodes() -> None:
    port = free_port()
    agents = [
        torchrun(
            "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}",
            JOB, "--devices=1", "--num-nodes=2",
        )
        for node in range(2)
    ]  # fmt: skip
    assert_as_lightnings_own(result(run_all(*agents)), "TorchElasticEnvironment", num_nodes=2)


@pytest.mark.slow
def test_slurm() -> None:
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODELIST": "127.0.0.1", "SLURM_NODEID": "0", "MASTER_PORT": free_port(),
    }  # fmt: skip
    tasks = {f"env{task}": job | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)}
    outputs = run_all([sys.executable, JOB], [sys.executable, JOB], **tasks)
    assert_as_lightnings_own(result(outputs), "SLURMEnvironment")


@pytest.mark.slow
def test_the_strategy_by_its_name() -> None:
    found = result(run_all([sys.executable, JOB, "--by-name"]))
    assert (found["world_size"], found["ep_size"], found["local_experts"]) == (2, 1, 4)
    before, _, after, _ = found["losses"]
    assert after < before
