"""Agreements between hosts: small integers and objects over gloo, beside whatever the GPUs exchange.

Waiting for a collective of the GPUs' group would stall the launch queue, and an operation that only one rank calls
would be paired with another rank's gradients. So hosts talk over groups of their own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Pending:
    """A sum under way."""

    def __init__(self, values: torch.Tensor, work: Any) -> None:
        self._values, self._work = values, work

    def read(self) -> list[int]:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._values.tolist()


class SideGroup:
    """All ranks' hosts. Collective to create; every method is collective, in the same order on all ranks."""

    def __init__(self, timeout: timedelta | None) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.group = dist.new_group(backend="gloo", timeout=timeout)

    def start_sum(self, values: list[int]) -> Pending:
        """Begin to add up `values` over the ranks; nobody waits before `read()`."""
        tensor = torch.tensor(values, dtype=torch.int64)
        return Pending(tensor, dist.all_reduce(tensor, group=self.group, async_op=True))

    def sum(self, values: list[int]) -> list[int]:
        return self.start_sum(values).read()

    def any(self, flag: bool) -> bool:
        return self.sum([int(flag)])[0] > 0

    def all(self, flag: bool) -> bool:
        return self.sum([int(flag)])[0] == self.size

    def gather(self, value: Any) -> list[Any]:
        """Every rank's (small, picklable) value, in order of rank."""
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any, src: int = 0) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src, group=self.group)
        return values[0]

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def send(self, values: list[int], dst: int) -> None:
        dist.send(torch.tensor(values, dtype=torch.int64), dst, group=self.group)

    def receive(self, length: int, src: int) -> list[int]:
        values = torch.empty(length, dtype=torch.int64)
        dist.recv(values, src, group=self.group)
        return values.tolist()

    def destroy(self) -> None:
        dist.destroy_process_group(self.group)
