"""Faults of other projects (gradients, pairing, dtypes, leaks), provoked at the experts' call."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ep.dispatch.base import Exchange
from lightning_ep.experts.layer import Experts, MoELayer
from tests.distributed import run_distributed
from tests.experts.hf_classes import tiny_experts
from tests.experts.own import IdExperts, OwnExperts
from tests.experts.spread import compare, make_mesh, random_batch, run, spread, worst

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 16, 24, 8, 3
EXACT = {"moe_dispatch_dedup": False}, {}


def grouped() -> Experts:
    torch.manual_seed(0)
    return Experts(HIDDEN, INNER, NUM_EXPERTS, initializer_range=0.5)


def ids(tokens: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]


# -- score and index paired wrongly


def combine_primes(options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    experts, _ = spread(IdExperts(NUM_EXPERTS).double(), make_mesh(2), **options)
    index = torch.randint(0, NUM_EXPERTS, (20, TOP_K), generator=torch.Generator().manual_seed(0))
    primes = [n for n in range(2, 300) if all(n % d for d in range(2, n))][: index.numel()]
    weights = torch.tensor(primes, dtype=torch.float64).view(index.shape)
    out = experts(torch.ones(20, 4, dtype=torch.float64), index, weights)
    return out.detach(), ((index + 1) * weights).sum(1)


@pytest.mark.parametrize("options", EXACT, ids=["dedup off", "dedup"])
def test_every_weight_meets_its_own_expert(options: dict[str, Any]) -> None:
    for out, by_hand in run_distributed(combine_primes, 2, options):
        assert torch.equal(out, by_hand[:, None].expand(-1, 4))


# -- a router silently untrained


def gradcheck_tokens_and_weights(options: dict[str, Any]) -> bool:
    experts, parallel = spread(grouped().double(), make_mesh(2), **options)
    batch = random_batch(ids(3, seed_of_rank()), HIDDEN, seed_of_rank(), torch.float64)

    def forward(x: Tensor, weights: Tensor) -> Tensor:
        return experts(x, batch.index_TK, weights)

    # Ranks stay in step: their inputs have the same shapes, so each perturbs as often as the others.
    x, weights = batch.x_TD.requires_grad_(), batch.weights_TK.requires_grad_()
    passed = torch.autograd.gradcheck(forward, (x, weights), fast_mode=False)
    parallel.queue.flush()
    return passed


def seed_of_rank() -> int:
    return torch.distributed.get_rank()


@pytest.mark.parametrize(
    "options", [*EXACT, {"delay_wgrad_compute": True}], ids=["dedup off", "dedup", "delayed wgrad"]
)
def test_gradcheck_of_tokens_and_routing_weights(options: dict[str, Any]) -> None:
    assert run_distributed(gradcheck_tokens_and_weights, 2, options) == [True, True]


def router_gradient() -> Tensor:
    torch.manual_seed(0)
    layer = MoELayer(HIDDEN, INNER, NUM_EXPERTS, TOP_K, initializer_range=0.5)
    layer.experts, _ = spread(layer.experts, make_mesh(2))
    layer(torch.randn(9, HIDDEN)).square().sum().backward()
    return layer.router.weight.grad


def test_the_router_learns_without_an_auxiliary_loss() -> None:
    for grad in run_distributed(router_gradient, 2):
        assert grad.abs().max() > 1e-3


# -- dtypes of ids and weights


def with_id_dtype(dtype: torch.dtype) -> dict[str, Tensor]:
    experts, _ = spread(grouped(), make_mesh(2))
    batch = random_batch(ids(9, seed_of_rank()).to(dtype), HIDDEN, seed_of_rank())
    return run(experts, batch)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_smaller_ids_mean_the_same(dtype: torch.dtype) -> None:
    expected, actual = run_distributed(with_id_dtype, 2, torch.int64), run_distributed(with_id_dtype, 2, dtype)
    for want, got in zip(expected, actual, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


def float_ids() -> None:
    with pytest.raises(ValueError, match=r"expert ids are torch\.float32"):
        with_id_dtype(torch.float32)


def test_ids_that_are_no_integers_are_refused() -> None:
    run_distributed(float_ids, 2)


def route_beyond(bad: int) -> str:
    experts, _ = spread(grouped(), make_mesh(2))
    index = ids(5, seed_of_rank())
    if seed_of_rank() == 1:
        index[2, 1] = bad
    with pytest.raises(RuntimeError) as error:
        experts(torch.randn(5, HIDDEN), index, torch.rand(5, TOP_K))
    return str(error.value)


@pytest.mark.parametrize("bad", [-1, NUM_EXPERTS, 2**40])
def test_ids_beyond_the_experts_end_every_rank_with_the_same_words(bad: int) -> None:
    for message in run_distributed(route_beyond, 2, bad):
        assert "MoE layer 0: expert ids outside [0, 8)" in message and "{1: 1}" in message


def route_nonfinite(weight: float, layer_before: bool) -> str:
    experts, _ = spread(grouped(), make_mesh(2))
    weights = torch.rand(5, TOP_K)
    with torch.no_grad():  # where nothing is spoilt by it
        experts(torch.randn(5, HIDDEN), ids(5, seed_of_rank()), weights * weight)
    if layer_before:
        experts._expert_parallel.finite.note(3, torch.full((2, 2), torch.nan))
    if seed_of_rank() == 1:
        weights[2, 1] = weight
        if layer_before:
            experts.down_proj.data[0, 0, 0] = torch.nan
    with pytest.raises(RuntimeError) as error:
        experts(torch.randn(5, HIDDEN), ids(5, seed_of_rank()), weights)
    return str(error.value)


@pytest.mark.parametrize("weight", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_end_every_rank(weight: float) -> None:
    for message in run_distributed(route_nonfinite, 2, weight, False):
        assert "MoE layer 0: " in message and "weights that are not finite" in message and "{1: 1}" in message
        assert "Seen here" not in message


def test_where_they_came_from() -> None:
    first, second = run_distributed(route_nonfinite, 2, torch.nan, True)
    assert first.endswith("Seen here: in the batch before, the output of MoE layer 3 was not finite.")
    assert second.endswith("the output of MoE layer 3 was not finite; this rank has NaN in experts.down_proj.")


def half_precision(dtype: torch.dtype, weight_dtype: torch.dtype) -> dict[str, Any]:
    experts, _ = spread(grouped().to(dtype), make_mesh(2))
    batch = random_batch(ids(9, seed_of_rank()), HIDDEN, seed_of_rank())
    x, weights = batch.x_TD.to(dtype).requires_grad_(), batch.weights_TK.to(weight_dtype).requires_grad_()
    out = experts(x, batch.index_TK, weights)
    out.backward(batch.grad_TD.to(out.dtype))
    return {"dtypes": (out.dtype, x.grad.dtype, weights.grad.dtype, experts.down_proj.grad.dtype), "grad": weights.grad}


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_tokens_with_weights_of_either_precision(weight_dtype: torch.dtype) -> None:
    exact = run_distributed(half_precision, 2, torch.float32, torch.float32)
    for rank, found in enumerate(run_distributed(half_precision, 2, torch.bfloat16, weight_dtype)):
        assert found["dtypes"] == (torch.bfloat16, torch.bfloat16, weight_dtype, torch.bfloat16)
        want = exact[rank]["grad"]
        assert (found["grad"].float() - want).abs().max() < 0.02 * want.abs().max()


# -- graphs that differ between ranks


def train_experts_alone(kind: str) -> dict[str, float]:
    """Neither tokens nor weights need a gradient, and rank 1's experts get nothing."""
    whole = grouped() if kind == "grouped" else OwnExperts(HIDDEN, INNER, NUM_EXPERTS)
    experts, _ = spread(whole, make_mesh(2))
    index = torch.randint(0, NUM_EXPERTS // 2, (5, TOP_K))
    out = experts(torch.randn(5, HIDDEN), index, torch.rand(5, TOP_K))
    out.square().sum().backward()
    return {name: 0.0 if p.grad is None else p.grad.abs().max().item() for name, p in experts.named_parameters()}


@pytest.mark.parametrize("kind", ["grouped", "own"])
def test_nobody_waits_for_experts_that_have_no_graph(kind: str) -> None:
    busy, idle = run_distributed(train_experts_alone, 2, kind, timeout=20)
    assert min(busy.values()) > 0 and set(idle.values()) == {0.0}


def gradients_of_idle_experts() -> list[bool]:
    experts, _ = spread(grouped(), make_mesh(2))
    run(experts, random_batch(torch.zeros(4, TOP_K, dtype=torch.int64), HIDDEN, 0))
    return [p.grad is not None and bool(p.grad.isfinite().all()) for p in experts.parameters()]


def test_experts_without_tokens_get_a_gradient_of_zeros() -> None:
    assert run_distributed(gradients_of_idle_experts, 2) == [[True, True]] * 2


def backward_twice() -> list[Tensor]:
    experts, parallel = spread(grouped(), make_mesh(2), delay_wgrad_compute=True)
    batch = random_batch(ids(6, seed_of_rank()), HIDDEN, seed_of_rank())
    x = batch.x_TD.requires_grad_()
    out = experts(x, batch.index_TK, batch.weights_TK)
    grads = []
    for retain in (True, False):
        out.backward(batch.grad_TD, retain_graph=retain)
        parallel.queue.flush()
        grads.append(torch.cat([x.grad.flatten(), experts.down_proj.grad.flatten()]))
    return grads


def test_a_retained_graph_gives_the_same_gradient_again() -> None:
    for once, twice in run_distributed(backward_twice, 2):
        torch.testing.assert_close(twice, 2 * once)


# -- inference mode


def train_after_inference_mode(options: dict[str, Any]) -> dict[str, float]:
    mesh = make_mesh(2)
    whole = grouped()
    batches = [random_batch(ids(6, rank), HIDDEN, rank) for rank in range(2)]
    if not options:
        return compare(whole, batches, mesh)
    experts, _ = spread(whole, mesh, **options)
    with torch.inference_mode():
        experts(batches[0].x_TD, batches[0].index_TK, batches[0].weights_TK)
    return {name: 0.0 if t.isfinite().all() else 1.0 for name, t in run(experts, batches[0]).items()}


@pytest.mark.parametrize("options", [{}, {"moe_router_force_load_balancing": True}], ids=["routed", "balanced"])
def test_training_after_a_forward_in_inference_mode(options: dict[str, Any]) -> None:
    assert max(worst(run_distributed(train_after_inference_mode, 2, options)).values()) < 1e-5


# -- memory creeps


class Failing(nn.Module):
    """Experts that fail when told to, in their forward or their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN))
        self.fail_in = ""

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = (x[:, None, None] @ self.w[top_k_index]).squeeze(2) * top_k_weights[..., None]
        if self.fail_in == "forward":
            raise ArithmeticError("forward")
        if self.fail_in == "backward":
            out.register_hook(self._fail)
        return out.sum(1)

    def _fail(self, grad: Tensor) -> None:
        raise ArithmeticError("backward")


def tensors_alive() -> int:
    """Tensors made since the last `gc.freeze`; a gloo thread may hold those of its last exchange a moment longer."""
    deadline = time.monotonic() + 2
    while True:
        gc.collect()
        alive = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


def alive_after_steps() -> dict[str, list[tuple[int, int]]]:
    """(exchanges, tensors) alive after each of several steps, by kind of step; exchanges without garbage collection."""
    experts, parallel = spread(Failing(), make_mesh(2), delay_wgrad_compute=True)
    made: list[weakref.ref[Exchange]] = []
    route = parallel.experts[0].module._expert_parallel.dispatcher.route

    def watched(index: Tensor) -> Exchange:
        exchange = route(index)
        made.append(weakref.ref(exchange))
        return exchange

    parallel.experts[0].module._expert_parallel.dispatcher.route = watched

    def step(kind: str, seed: int) -> None:
        batch = random_batch(ids(5 + seed % 3, seed_of_rank() + seed), HIDDEN, seed)
        experts.fail_in = kind
        try:
            if kind == "eval":
                with torch.no_grad():
                    experts(batch.x_TD, batch.index_TK, batch.weights_TK)
            elif kind == "no backward":
                experts(batch.x_TD.requires_grad_(), batch.index_TK, batch.weights_TK)
            else:
                run(experts, batch, parallel)
        except ArithmeticError:
            parallel.queue.drop()

    counts: dict[str, list[tuple[int, int]]] = {}
    step("train", 0)  # what the first step makes may stay
    gc.collect()
    gc.freeze()  # what is older costs no time below
    gc.disable()
    try:
        for kind in ("train", "eval", "no backward", "forward", "backward"):
            counts[kind] = []
            for seed in range(6):
                step(kind, seed)
                exchanges = sum(ref() is not None for ref in made)
                counts[kind].append((exchanges, tensors_alive()))
    finally:
        gc.enable()
        gc.unfreeze()
    return counts


def test_nothing_of_a_step_stays_alive() -> None:
    for counts in run_distributed(alive_after_steps, 2):
        for kind, steps in counts.items():
            assert steps == [(0, 0)] * 6, kind


# -- mixed precision


def under_autocast(model_type: str, class_name: str) -> dict[str, float]:
    torch.manual_seed(0)
    whole = tiny_experts(model_type, class_name) if model_type else OwnExperts(HIDDEN, INNER, NUM_EXPERTS)
    batches = [random_batch(ids(9, rank), HIDDEN, rank) for rank in range(2)]
    return compare(whole, batches, make_mesh(2), mixed=True)


@pytest.mark.parametrize(
    "model_type, class_name",
    [
        ("qwen3_moe", "Qwen3MoeExperts"), ("gpt_oss", "GptOssExperts"), ("muse_spark", "MuseSparkExperts"),
        ("nemotron_h", "NemotronHExperts"), ("", "OwnExperts"),
    ],
)  # fmt: skip
def test_mixed_precision_rounds_as_the_class_itself_does(model_type: str, class_name: str) -> None:
    errors = worst(run_distributed(under_autocast, 2, model_type, class_name))
    assert {name: error for name, error in errors.items() if not error < 0.03} == {}
