"""A wrong configuration ends on every rank at once: one error, no process group, no weights, no hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_rank_refuses_before_anything_is_built() -> None:
    command = [sys.executable, "-m", "tests.constraints.refused"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: ConfigurationError groups=False weights=False" in done.stderr
    for rule in ("experts-divisible", "overlap-mtp-layers"):
        assert done.stderr.count(f"[{rule}]") == 2
    assert "num_moe_experts=7 (num_experts of Qwen2MoeConfig), expert_model_parallel_size=2" in done.stderr
