"""1f1b changes when things run, never what comes out: bit-identical losses, gradients and parameters."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_distributed
from tests.trained import train_distributed


@pytest.mark.parametrize("world_size, ep_size", [(2, 2), (4, 2), (4, 4)])
def test_bit_identical_to_no_overlap(world_size: int, ep_size: int) -> None:
    def run(options: dict) -> list[dict]:
        return run_distributed(
            train_distributed,
            world_size,
            "qwen3_moe",
            ep_size,
            20,
            4,
            1.0,
            "adamw",
            2e-3,
            {"strategy": options},
            timeout=120,
        )

    plain, overlapped = run({}), run({"overlap_moe_expert_parallel_comm": True})
    for one, other in zip(plain, overlapped, strict=True):
        assert one["losses"] == other["losses"]
        assert one["norms"] == other["norms"]
        for name, parameter in one["params"].items():
            assert torch.equal(parameter, other["params"][name]), name
