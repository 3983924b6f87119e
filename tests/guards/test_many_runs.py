"""One process that trains again and again: no run leaves groups behind, which have threads."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from lightning_ep import EPOverlapStrategy
from tests.distributed import run_distributed
from tests.strategy.toy import ToyModule, loader
from tests.trained import quiet_trainer


def gloo_threads_after_runs() -> list[int]:
    counts = []
    for _ in range(4):
        trainer = quiet_trainer(strategy=EPOverlapStrategy(2), use_distributed_sampler=False)
        module, data = ToyModule(), loader(2, 2, dist.get_rank())
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
        dist.barrier()
        counts.append(sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()))
    return counts


def test_no_run_leaves_groups_behind() -> None:
    for counts in run_distributed(gloo_threads_after_runs, 2):
        # Groups of other tests in this process may go meanwhile.
        assert counts[3] <= counts[1] and counts[0] > 0, counts
