"""Ranks that torchrun starts again find nothing of the attempt before in its store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_ep.guards.attempt import attempt_store


@pytest.fixture
def agent() -> dist.TCPStore:
    """The store of torchrun's agent."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(agent: dist.TCPStore, ranks: range, seconds: float = 20) -> list[dist.Store]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        arguments = [("127.0.0.1", agent.port, rank, 3, timedelta(seconds=seconds)) for rank in ranks]
        return list(pool.map(lambda args: attempt_store(*args), arguments))


def test_every_attempt_has_its_own_keys(agent: dist.TCPStore) -> None:
    for attempt in range(3):
        stores = start(agent, range(3))
        assert not any(store.check(["address/1"]) for store in stores)
        stores[1].set("address/1", str(attempt))
        assert [store.get("address/1") for store in stores] == [str(attempt).encode()] * 3


def test_the_words_of_a_failed_attempt_are_no_answer(agent: dist.TCPStore) -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 did not start within 0.1 s"):
        start(agent, range(1, 2), seconds=0.1)
    with pytest.raises(RuntimeError, match=r"ranks 1-2 did not start within 0.1 s"):
        start(agent, range(0, 1), seconds=0.1)
    names = {store.add("met", 1) for store in start(agent, range(3))}
    assert names == {1, 2, 3}
