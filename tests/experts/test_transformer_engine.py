"""Experts on Transformer Engine's grouped GEMM: how it is called, on a fake that computes and insists as it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ep.dispatch.base import ExpertRows
from lightning_ep.experts.gemm import Gemm, Split, TorchGemm, gemm_backend
from lightning_ep.experts.grouped import grouped_experts
from lightning_ep.experts.interface import inspect_experts
from lightning_ep.experts.layer import Experts
from lightning_ep.experts.transformer_engine import TransformerEngineGemm
from lightning_ep.experts.wgrad import WeightGradQueue
from tests.distributed import run_distributed
from tests.experts import fake_te
from tests.experts.fake_te import Recipe
from tests.experts.hf_classes import tiny_experts
from tests.experts.spread import make_mesh, random_batch, run, spread

COUNTS = [3, 0, 17, 40]
D, I = 64, 96


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    fake_te.install()
    fake_te.calls.clear()
    yield
    fake_te.uninstall()


def split(counts: list[int]) -> Split:
    return Split(torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), counts)


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0]])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_four_products_equal_torchs(transposed: bool, counts: list[int]) -> None:
    torch.manual_seed(0)
    own, te, cut = TorchGemm(), TransformerEngineGemm(), split(counts)
    x, grad = torch.randn(sum(counts), D), torch.randn(sum(counts), I)
    weight = torch.randn((4, D, I) if transposed else (4, I, D))
    start = torch.randn_like(weight)

    def products(gemm: Gemm) -> list[Tensor]:
        total = start.clone()
        gemm.add_weight_grad(total, grad, x, cut, transposed)
        return [
            gemm.product(x, weight, cut, transposed),
            gemm.input_grad(grad, weight, cut, transposed),
            gemm.weight_grad(grad, x, cut, transposed),
            total,
        ]

    for got, want in zip(products(te), products(own), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    layouts = ["NT+", "NN", "TN", "NT"] if transposed else ["NT+", "TN", "NN", "NT"]
    assert fake_te.calls == (layouts if sum(counts) else [])


# -- FP8


def experts_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "plain SwiGLU":
        return Experts(D, I, 4, initializer_range=0.1)
    return tiny_experts("gpt_oss", "GptOssExperts")  # transposed, interleaved, biased


def run_experts(module: nn.Module, gemm: Gemm, counts: list[int], queue: WeightGradQueue | None = None) -> list[Tensor]:
    found = inspect_experts("", module)
    hidden = module.gate_up_proj.shape[1 if module.is_transposed else 2]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), hidden, generator=generator, requires_grad=True)
    weights = torch.rand(sum(counts), generator=generator).requires_grad_()
    rows = ExpertRows(x, weights, split(counts).offsets_L, counts)
    module.zero_grad()
    out = grouped_experts(module, found.layout, rows, gemm, 0, queue)
    out.square().sum().backward()
    if queue is not None:
        queue.flush()
    return [out.detach(), x.grad, weights.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("kind", ["plain SwiGLU", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
def test_fp8_rounds_and_pads_and_nothing_else(recipe: str, kind: str) -> None:
    """Close to full precision, with every operand quantized for the layout that reads it (the fake insists)."""
    module = experts_of(kind)
    if kind == "gpt_oss":
        module = _widened(module)
    counts = [3, 0, 17, 40] if kind == "plain SwiGLU" else [3, 0, 17, 40, 1, 0, 0, 2]
    exact, rounded = (
        run_experts(module, TorchGemm(), counts),
        run_experts(module, TransformerEngineGemm(Recipe(recipe)), counts),
    )
    for got, want in zip(rounded, exact, strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() <= 0.12 * want.norm()
    assert any(not torch.equal(got, want) for got, want in zip(rounded, exact, strict=True))


def _widened(module: nn.Module) -> nn.Module:
    """Sizes of a multiple of 32, which FP8's blocks need."""
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        p = getattr(module, name)
        sizes = [p.shape[0], *(32 * (-(-n // 32)) for n in p.shape[1:])]
        setattr(module, name, nn.Parameter(torch.randn(sizes) * 0.5))
    inner = module.down_proj.shape[1]
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach()[:, :, : 2 * inner].clone())
    module.gate_up_proj_bias = nn.Parameter(module.gate_up_proj_bias.detach()[:, : 2 * inner].clone())
    return module


def test_fp8_follows_the_context_of_the_forward() -> None:
    make = gemm_backend("transformer_engine", lambda: 0)
    with fake_te.autocast(Recipe("current")):
        inside = make()
    assert isinstance(inside, TransformerEngineGemm) and inside.recipe is not None and inside.row_multiple == 16
    outside = make()
    assert isinstance(outside, TransformerEngineGemm) and outside.recipe is None and outside.row_multiple == 1


@pytest.mark.parametrize("kind", ["delayed", "nvfp4"])
def test_recipes_with_a_state_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="does not support the recipe Recipe; use Float8CurrentScaling"):
        TransformerEngineGemm(Recipe(kind))


@pytest.mark.parametrize("recipe", [None, "current"])
def test_delayed_fused_gradients_add_up(recipe: str | None) -> None:
    """TE's own backward_dw would assign over the first micro-batch's."""
    module, gemm = experts_of("plain SwiGLU"), TransformerEngineGemm(recipe and Recipe(recipe))
    once = run_experts(module, gemm, COUNTS)
    queue = WeightGradQueue(fuse=True)
    queue.delay = True
    module.zero_grad(set_to_none=True)
    module.zero_grad = lambda: None  # accumulate
    for times in (1, 2):
        grads = run_experts(module, gemm, COUNTS, queue)[3:]
        queue.assert_empty()
        for got, want in zip(grads, once[3:], strict=True):
            torch.testing.assert_close(got, times * want, rtol=1e-4, atol=1e-4)
    assert fake_te.calls.count("NT+") == 4


# -- spread over ranks, on the parameters of the other experts


def spread_and_run(options: dict[str, Any]) -> dict[str, Tensor]:
    fake_te.install()
    try:
        torch.manual_seed(0)
        experts, parallel = spread(Experts(D, I, 8, initializer_range=0.1), make_mesh(2), **options)
        rank = torch.distributed.get_rank()
        index = torch.rand(20, 8, generator=torch.Generator().manual_seed(rank)).argsort(1)[:, :3]
        for seed in range(2):
            results = run(experts, random_batch(index, D, rank + 10 * seed), parallel)
        assert set(experts.state_dict()) == {"gate_up_proj", "down_proj"}
        return {**results, **{name: p.grad for name, p in experts.named_parameters()}}
    finally:
        fake_te.uninstall()


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_spread_experts_equal_grouped_mm(delay: bool, fuse: bool) -> None:
    expected = run_distributed(spread_and_run, 2, {})
    options = {"delay_wgrad_compute": delay, "gradient_accumulation_fusion": fuse}
    actual = run_distributed(spread_and_run, 2, {"experts_implementation": "transformer_engine", **options})
    for want, got in zip(expected, actual, strict=True):
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-4)
