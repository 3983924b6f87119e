"""A wrong configuration ends on every rank at once: one error, no process group, no weights, no hang."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launch.test_launchers import FOREIGN, ROOT

PROGRAM = ["-m", "tests.constraints.refused"]
LAUNCHERS = {
    "Lightning": [sys.executable, *PROGRAM],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *PROGRAM],
}


def refused(launcher: str, way: str) -> str:
    """What both ranks wrote; fails when the job ended well, or not by itself."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*LAUNCHERS[launcher], way], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0, done.stderr  # Lightning kills the ranks that are left
    return done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_refuses_before_anything_is_built(launcher: str) -> None:
    said = refused(launcher, "early")
    for rank in (0, 1):
        assert f"rank {rank}: ConfigurationError default group=False built=False allocated=False" in said
    for rule in ("experts-divisible", "overlap-mtp-layers"):
        assert said.count(f"[{rule}]") == 2
    assert "num_moe_experts=7 (num_experts of Qwen2MoeConfig), expert_model_parallel_size=2" in said


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_only_the_built_model_shows_is_refused_before_its_weights_exist(launcher: str) -> None:
    # The process groups are there by then: Lightning builds the model after them.
    said = refused(launcher, "late")
    for rank in (0, 1):
        assert f"rank {rank}: ConfigurationError default group=True built=True allocated=False" in said
    assert said.count("num_moe_experts=7 (1 experts modules, the first is model.experts)") == 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_refusing_rank_ends_the_job(launcher: str) -> None:
    said = refused(launcher, "rank1")
    assert "rank 1: ConfigurationError default group=False built=False allocated=False" in said
    assert "rank 0: ConfigurationError" not in said
