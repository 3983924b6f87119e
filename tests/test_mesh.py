"""Process groups: who is with whom, under which names, waiting for how long."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ep import EPOverlapStrategy
from lightning_ep.mesh import build_mesh
from tests.distributed import run_distributed
from tests.strategy.toy import ToyModule, loader
from tests.trained import quiet_trainer


def describe_mesh(ep_size: int) -> dict[str, Any]:
    mesh = build_mesh(ep_size, "cpu", timedelta(seconds=17))
    axes = mesh.device_mesh
    groups = {"ep": mesh.ep_group, "edp": mesh.edp_group}
    total = {}
    for name, group in groups.items():
        count = torch.tensor(1.0)
        dist.all_reduce(count, group=group)
        total[name] = int(count)
    return {
        "ep": dist.get_process_group_ranks(mesh.ep_group),
        "edp": dist.get_process_group_ranks(mesh.edp_group),
        "place": (mesh.edp_rank, mesh.ep_rank),
        "sizes": (mesh.edp_size, mesh.ep_size, mesh.world_size),
        "axes": axes.mesh_dim_names,
        "grid": axes.mesh.tolist(),
        "coordinate": tuple(axes.get_coordinate()),
        "same groups": all(axes.get_group(name) is group for name, group in groups.items()),
        "counted": total,
        "timeouts": {g._get_backend(torch.device("cpu")).options._timeout for g in groups.values()},
        "experts": mesh.local_experts(8),
    }


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_ep_groups_are_consecutive_and_edp_groups_stride_over_them(ep_size: int) -> None:
    for rank, found in enumerate(run_distributed(describe_mesh, 4, ep_size)):
        first = rank - rank % ep_size
        assert found["ep"] == list(range(first, first + ep_size))
        assert found["edp"] == list(range(rank % ep_size, 4, ep_size))
        assert found["place"] == found["coordinate"] == (rank // ep_size, rank % ep_size)
        assert found["sizes"] == (4 // ep_size, ep_size, 4)
        assert found["axes"] == ("edp", "ep")
        assert found["grid"] == [list(range(i, i + ep_size)) for i in range(0, 4, ep_size)]
        assert found["same groups"]
        assert found["counted"] == {"ep": ep_size, "edp": 4 // ep_size}
        assert found["timeouts"] == {timedelta(seconds=17)}
        per_rank = 8 // ep_size
        assert found["experts"] == slice(rank % ep_size * per_rank, (rank % ep_size + 1) * per_rank)


def refused_sizes() -> list[str]:
    messages = []
    for size in (3, 8, 0):
        with pytest.raises(ValueError) as error:
            build_mesh(size, "cpu")
        messages.append(str(error.value))
    return messages


def test_a_size_that_does_not_divide_the_world_is_refused_with_those_that_do() -> None:
    for messages in run_distributed(refused_sizes, 4):
        for size, message in zip((3, 8, 0), messages, strict=True):
            assert (
                message
                == f"expert_model_parallel_size={size} does not divide the world size 4; choose one of [1, 2, 4]"
            )


def groups_after_each_call() -> tuple[list[int], set[timedelta]]:
    strategy = EPOverlapStrategy(expert_model_parallel_size=2, timeout=timedelta(seconds=33))
    trainer = quiet_trainer(strategy=strategy, use_distributed_sampler=False)
    module, batches = ToyModule(), loader(2, 2, dist.get_rank())
    counts = []
    for call in (trainer.fit, trainer.validate, trainer.test, trainer.predict, trainer.validate):
        call(module, batches)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    groups = (strategy.mesh.ep_group, strategy.mesh.edp_group)
    return counts, {g._get_backend(torch.device("cpu")).options._timeout for g in groups}


def test_the_trainer_makes_groups_once_and_hands_its_timeout_on() -> None:
    for counts, timeouts in run_distributed(groups_after_each_call, 2):
        assert len(set(counts)) == 1
        assert timeouts == {timedelta(seconds=33)}
