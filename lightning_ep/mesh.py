"""Process groups of expert parallelism.

    world of 8, expert_model_parallel_size 4

        rank        0  1  2  3 | 4  5  6  7
        EP group    [0  1  2  3] [4  5  6  7]     consecutive ranks: inside a node where they fit
        EDP groups  [0 4] [1 5] [2 6] [3 7]       ranks that hold the same experts

Every rank is a data-parallel rank with its own batch; dense parameters are replicated over the world.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ExpertMesh:
    """Where this rank stands: its EP group, its EDP group, and both as the axes ("edp", "ep") of a DeviceMesh."""

    device_mesh: DeviceMesh
    ep_group: ProcessGroup
    edp_group: ProcessGroup
    ep_size: int
    ep_rank: int
    edp_size: int
    edp_rank: int
    world_size: int

    def local_experts(self, num_experts: int) -> slice:
        """The experts that live on this rank."""
        per_rank = num_experts // self.ep_size
        return slice(self.ep_rank * per_rank, (self.ep_rank + 1) * per_rank)

    def destroy(self) -> None:
        """Destroy the two groups (collective over their members)."""
        for group in (self.ep_group, self.edp_group):
            dist.destroy_process_group(group)


# The groups of the last run in this process, if it ended well, with what they were made for: a process that trains again
# and again must not gather groups, which have threads and memory of the GPU.
_kept: tuple[tuple, ExpertMesh] | None = None


def keep_mesh(mesh: ExpertMesh | None, timeout: timedelta | None = None) -> None:
    """Let the next run take over these groups; None after a failure, which may have left them in disorder."""
    global _kept
    _kept = None if mesh is None else (_purpose(mesh.ep_size, mesh.device_mesh.device_type, timeout), mesh)


def kept_mesh(ep_size: int, device_type: str, timeout: timedelta | None = None) -> ExpertMesh | None:
    """Groups of an earlier run that serve this one too. Ranks may differ in whether they have some."""
    return _kept[1] if _kept is not None and _kept[0] == _purpose(ep_size, device_type, timeout) else None


def _purpose(ep_size: int, device_type: str, timeout: timedelta | None) -> tuple:
    return dist.group.WORLD, ep_size, device_type, timeout


def build_mesh(ep_size: int, device_type: str, timeout: timedelta | None = None) -> ExpertMesh:
    """Create the EP and EDP groups of every rank. Collective: all ranks call it, in the same order.

    `timeout` has to be passed on: a default group's timeout does not reach the groups created from it.
    Raises ValueError when the world cannot be divided by `ep_size`.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if ep_size < 1 or world % ep_size:
        raise ValueError(
            f"expert_model_parallel_size={ep_size} does not divide the world size {world}; "
            f"choose one of {[n for n in range(1, world + 1) if world % n == 0]}"
        )
    ranks = torch.arange(world).view(-1, ep_size)
    ep_group = _own_group(ranks.tolist(), rank, timeout, high_priority=True)
    edp_group = _own_group(ranks.t().tolist(), rank, timeout, high_priority=False)
    device_mesh = DeviceMesh.from_group([edp_group, ep_group], device_type, mesh=ranks, mesh_dim_names=("edp", "ep"))
    return ExpertMesh(
        device_mesh=device_mesh,
        ep_group=ep_group,
        edp_group=edp_group,
        ep_size=ep_size,
        ep_rank=rank % ep_size,
        edp_size=world // ep_size,
        edp_rank=rank // ep_size,
        world_size=world,
    )


def _own_group(groups: list[list[int]], rank: int, timeout: timedelta | None, high_priority: bool) -> ProcessGroup:
    own = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout, pg_options=_nccl_options(high_priority))
        if rank in ranks:
            own = group
    assert own is not None
    return own


def _nccl_options(high_priority: bool):
    """Dispatch and combine run beside compute: their stream must not queue behind it."""
    if dist.get_backend() != "nccl" or not high_priority:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
