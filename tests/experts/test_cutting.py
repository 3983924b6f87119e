"""What is cut, what is left alone, and what is refused, with words that name the module."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ep import ExpertsNotFoundError, MoELayer, find_experts
from lightning_ep.config import EPConfig
from lightning_ep.experts.model import ParallelModel
from tests.distributed import run_distributed
from tests.experts.own import OwnExperts
from tests.experts.spread import make_mesh, random_batch, run, spread

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 16, 24, 8, 3


class HalfAsLong(OwnExperts):
    """Has a parameter for all experts that is as long as the experts of one rank, once they are cut."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, INNER, NUM_EXPERTS)
        self.common = nn.Parameter(torch.zeros(NUM_EXPERTS // 2))
        self.register_buffer("load", torch.arange(float(NUM_EXPERTS)))


def cut_twice() -> tuple[tuple[str, ...], dict[str, tuple[int, ...]], Tensor]:
    root = nn.ModuleDict({"experts": HalfAsLong()})
    parallel = ParallelModel(root, EPConfig(expert_model_parallel_size=2), make_mesh(2))
    for _ in range(2):
        parallel.shard()
    module = root["experts"]
    return parallel.experts[0].sharded, {n: tuple(p.shape) for n, p in module.named_parameters()}, module.load


def test_a_second_set_up_cuts_nothing_more_and_claims_nothing_more() -> None:
    for rank, (sharded, shapes, load) in enumerate(run_distributed(cut_twice, 2)):
        assert set(sharded) == {"w1", "b1", "w2", "scale", "load"}
        assert shapes["w1"] == (4, HIDDEN, INNER) and shapes["scale"] == (4,)
        assert shapes["common"] == (4,) and shapes["temperature"] == ()
        assert load.tolist() == [4 * rank + i for i in range(4)]


def memory_of_a_share() -> tuple[int, bool]:
    layer = MoELayer(HIDDEN, INNER, NUM_EXPERTS, TOP_K)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    parallel = ParallelModel(layer, EPConfig(expert_model_parallel_size=2), make_mesh(2))
    parallel.shard()
    weight = layer.experts.down_proj
    held = any(p is weight for group in optimizer.param_groups for p in group["params"])
    return weight.untyped_storage().nbytes() // weight.element_size(), held


def test_the_rest_is_freed_and_optimizers_keep_their_parameters() -> None:
    assert run_distributed(memory_of_a_share, 2) == [(4 * HIDDEN * INNER, True)] * 2


def copies() -> list[bool]:
    """A deep copy of spread experts computes with its own weights, over the same groups."""
    experts, _ = spread(OwnExperts(HIDDEN, INNER, NUM_EXPERTS), make_mesh(2))
    grouped, _ = spread(MoELayer(HIDDEN, INNER, NUM_EXPERTS, TOP_K, initializer_range=0.5).experts, make_mesh(2))
    index = torch.arange(15).view(5, TOP_K) % NUM_EXPERTS
    found = []
    for module in (experts, grouped):
        copy = deepcopy(module)
        batch = random_batch(index, HIDDEN, 0)
        same = torch.equal(run(module, batch)["output"], run(copy, batch)["output"])
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.mul_(2)
        differs = not torch.equal(run(module, batch)["output"], run(copy, batch)["output"])
        found += [same, differs, copy.forward.__self__ is copy]
    return found


def test_deep_copies_live_on_their_own() -> None:
    assert run_distributed(copies, 2) == [[True] * 6] * 2


def balanced() -> dict[str, Any]:
    mesh = make_mesh(2)
    experts, _ = spread(MoELayer(HIDDEN, INNER, NUM_EXPERTS, 2).experts, mesh, moe_router_force_load_balancing=True)
    everything_to_one = torch.full((32, 2), 3)
    got: list[list[int]] = []
    dispatcher = experts._expert_parallel.dispatcher
    route = dispatcher.route

    def watched(index: Tensor) -> Any:
        exchange = route(index)
        got.append([*index.shape, index.dtype == torch.int64, len({tuple(sorted(set(row))) for row in index.tolist()})])
        seen.append(index)
        return exchange

    seen: list[Tensor] = []
    dispatcher.route = watched
    out = run(experts, random_batch(everything_to_one, HIDDEN, 0))
    return {
        "shape": tuple(out["output"].shape),
        "weights trained": bool(out["routing weight gradient"].abs().min() > 0),
        "load": seen[0].flatten().bincount(minlength=NUM_EXPERTS).tolist(),
        "distinct": all(len(set(row)) == 2 for row in seen[0].tolist()),
        "described": got[0],
        "same every time": torch.equal(experts._expert_parallel.balanced(everything_to_one), seen[0]),
    }


def test_forced_balance_keeps_shapes_and_loads_every_expert_alike() -> None:
    for found in run_distributed(balanced, 2):
        assert found["shape"] == (32, HIDDEN)
        assert found["load"] == [8] * NUM_EXPERTS
        assert found["distinct"] and found["weights trained"] and found["same every time"]
        assert found["described"][:3] == [32, 2, True] and found["described"][3] > 4


# -- refusals


class Unknown(nn.Module):
    """Called `...Experts`, stacked weights, another call."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.zeros(NUM_EXPERTS, 4, 4)) for _ in range(2))

    def forward(self, tokens_by_expert: Tensor) -> Tensor:
        return tokens_by_expert


class UnknownExperts(Unknown):
    pass


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.zeros(8, 4, 4)), nn.Parameter(torch.zeros(6, 4, 4))

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return x


def without_bias() -> nn.Module:
    experts = MoELayer(HIDDEN, INNER, NUM_EXPERTS, TOP_K).experts
    experts.has_bias = True
    return experts


@pytest.mark.parametrize(
    "module, words",
    [
        (UnknownExperts(), r"'block\.experts' \(UnknownExperts\) has an unknown layout.*tokens_by_expert"),
        (Uneven(), r"'block\.experts' \(Uneven\) has 3-D parameters with different numbers of experts \[6, 8\]"),
        (
            without_bias(),
            r"'block\.experts' \(Experts\) declares .* but has no \['gate_up_proj_bias', 'down_proj_bias'\]",
        ),
    ],
    ids=["another call", "uneven", "flags that lie"],
)
def test_an_unknown_layout_names_the_module(module: nn.Module, words: str) -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"experts": module})})
    with pytest.raises(ValueError, match=words):
        find_experts(model)


def test_a_model_without_experts_is_told_what_to_use() -> None:
    with pytest.raises(ExpertsNotFoundError, match=r"no experts found in Linear.*strategy='ddp'.*MoELayer"):
        find_experts(nn.Linear(2, 2))
    assert find_experts(nn.Linear(2, 2), required=False) == []


def test_a_convolution_is_no_experts() -> None:
    assert find_experts(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Bilinear(2, 2, 2), Unknown()), required=False) == []


def test_llama4_is_named_as_not_supported() -> None:
    Llama4TextExperts = type("Llama4TextExperts", (Unknown,), {})
    with pytest.raises(ExpertsNotFoundError, match=r"block \(Llama4TextExperts\): llama4 sorts tokens"):
        find_experts(nn.ModuleDict({"block": Llama4TextExperts()}))


def cut_again(first: int, then: int, num_experts: int) -> str:
    layer = nn.ModuleDict({"mlp": MoELayer(HIDDEN, INNER, num_experts, 2)})
    try:
        for size in (first, then):
            ParallelModel(layer, EPConfig(expert_model_parallel_size=size), make_mesh(size)).shard()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("first, then", [(4, 2), (2, 4), (2, 1)])
def test_experts_that_were_cut_for_another_size_are_refused(first: int, then: int) -> None:
    for message in run_distributed(cut_again, 4, first, then, 8):
        assert f"experts module 'mlp.experts' was cut to {8 // first} of 8 experts before" in message
        assert f"expert_model_parallel_size={then} needs {8 // then}; build the model again" in message


def test_experts_that_do_not_divide_name_module_and_size() -> None:
    for message in run_distributed(cut_again, 4, 4, 4, 6):
        assert message == (
            "experts module 'mlp.experts' has 6 experts, which expert_model_parallel_size=4 does not divide; "
            "choose a divisor of 6"
        )
