"""What the strategy says of the model it found: once a module, and with the size of the whole."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.model_summary import summarize

from tests.distributed import run_distributed
from tests.strategy.toy import Toy, ToyModule, loader, make_trainer


class Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def said() -> dict[str, Any]:
    logger, keep = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Keep()
    level = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        trainer, module = make_trainer(2, {}), ToyModule()
        batches = loader(2, 2, dist.get_rank())
        trainer.validate(module, batches, verbose=False)
        trainer.fit(module, batches, batches)
        trainer.test(module, batches, verbose=False)
        first = [m for m in keep.messages if m.startswith("experts found")]
        counts, summary = trainer.strategy.parallel.count_parameters(), summarize(module).total_parameters
        trainer.validate(ToyModule(), batches, verbose=False)
        both = [m for m in keep.messages if m.startswith("experts found")]
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)
    return {"first": first, "both": both, "counts": counts, "summary": summary}


def test_experts_are_described_once_a_module_with_the_size_of_the_whole() -> None:
    ranks = run_distributed(said, 2)
    whole = dict(Toy().named_parameters())
    total = sum(p.numel() for p in whole.values())
    experts = sum(p.numel() for name, p in whole.items() if ".experts." in name)
    assert 0 < experts < total
    for rank in ranks:
        assert rank["counts"] == (total, experts, total - experts // 2)
        assert rank["summary"] == total - experts // 2  # what the last words of the block say
    assert [(len(rank["first"]), len(rank["both"])) for rank in ranks] == [(1, 2), (0, 0)]
    assert ranks[0]["first"][0].splitlines()[-1] == (
        f"  {total / 1000:.1f} K parameters, of them {experts / 1000:.1f} K in experts; {(total - experts / 2) / 1000:.1f} K "
        "on this rank, which Lightning's summary shows"
    )
