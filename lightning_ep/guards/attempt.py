"""torchrun's restarts: each attempt gets keys of its own in the rendezvous store.

The store lives in torchrun's agent and outlives a restart, together with all that the attempt before wrote into it: a
restarted rank would find sockets there on which nobody listens any more, and fail (pytorch/pytorch#135712). So rank 0
gives the attempt a name, and tells it only to ranks that live:

    rank r   hello/r = a new word   ->   rank 0   (which may have read the word of the attempt before: it looks again)
    rank r   <-  welcome/word = name     rank 0
    rank r   here/name/r            ->   rank 0   (until all are here)

(torchrun counts its restarts, but every agent for itself.)
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from lightning_ep.guards.failure import naming


def attempt_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The launcher's store, with keys of this attempt. Collective.

    Raises RuntimeError when ranks do not come within `timeout`; rank 0's names them.
    """
    shared = dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    store = dist.PrefixStore("lightning_ep/attempts", shared)
    name = _name_it(store, world_size, timeout) if rank == 0 else _learn_name(store, rank, timeout)
    return dist.PrefixStore(f"lightning_ep/attempt/{name}", shared)


def _name_it(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    name, words, missing = uuid4().hex, {}, set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{naming(sorted(missing))} did not start within {timeout.total_seconds():g} s")
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]) and (word := store.get(f"hello/{rank}").decode()) != words.get(rank):
                words[rank] = word
                store.set(f"welcome/{word}", name)
            if store.check([f"here/{name}/{rank}"]):
                missing.discard(rank)
        time.sleep(0.02)
    return name


def _learn_name(store: dist.Store, rank: int, timeout: timedelta) -> str:
    word = uuid4().hex
    store.set(f"hello/{rank}", word)
    try:
        store.wait([f"welcome/{word}"], timeout)
    except dist.DistError as error:
        raise RuntimeError(f"rank 0 did not start within {timeout.total_seconds():g} s") from error
    name = store.get(f"welcome/{word}").decode()
    store.set(f"here/{name}/{rank}", "")
    return name
