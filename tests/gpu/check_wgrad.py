"""Delayed and fused expert weight gradients with real kernels: grouped_mm and Transformer Engine, bits and errors.

on_one_gpu 2 tests/gpu/check_wgrad.py      (or torchrun --nproc-per-node 1; the Trainer part needs 2 ranks)

Every line stands for itself; the last one says whether all held. Transformer Engine is left out where it is missing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ep.experts import gemm, wgrad_kernels
from lightning_ep.experts.gemm import Gemm, Split, TorchGemm
from lightning_ep.experts.layer import Experts
from lightning_ep.imports import is_available
from tests.gpu.common import DEVICE, DEVICES, RANK, WORLD, parallelize, say, start

D, I, E, TOP_K, TOKENS = 1024, 384, 16, 4, 2048
# Of the norm, against float64 from the same bf16 operands. A gradient of half precision is rounded once more, to 2^-9;
# micro-batches that add up in half precision are rounded each time. FP8 has three bits of mantissa, two in gradients.
FLOAT32, BF16, FP8 = 2e-6, 8e-3, 8e-2


def held(what: str, ok: bool, note: str = "") -> None:
    """One line, of the ranks' common verdict."""
    verdict = torch.tensor(float(not ok), device=DEVICE)
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    FAILED.append(bool(verdict.item()))
    say(f"{'FAILED' if FAILED[-1] else 'ok':7s} {what}  {note}")


def attempt(what: str, check: Callable[[], None]) -> None:
    try:
        check()
    except Exception:
        FAILED.append(True)
        print(f"FAILED  {what}, rank {RANK}\n{traceback.format_exc()}", flush=True)


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# -- the products alone


def backends() -> dict[str, Gemm]:
    found: dict[str, Gemm] = {"grouped_mm": TorchGemm()}
    if is_available("transformer_engine"):
        from lightning_ep.experts.transformer_engine import TransformerEngineGemm

        found["transformer_engine"] = TransformerEngineGemm()
    return found


def check_products(transposed: bool) -> None:
    """All four products of each backend against float64; experts without rows, uneven ones; poisoned memory."""
    torch.manual_seed(RANK)
    counts = [0, 1, 700, 0, 33, 1300, 14, 0]
    split = Split(torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32), counts)
    x, grad = (torch.randn(sum(counts), n, device=DEVICE).bfloat16() for n in (D, I))
    weight = torch.randn((8, D, I) if transposed else (8, I, D), device=DEVICE).bfloat16()
    before = torch.randn(weight.shape, device=DEVICE)
    left, right = (x, grad) if transposed else (grad, x)
    pairs = list(zip(left.double().split(counts), right.double().split(counts), strict=True))
    outer = torch.stack([a.t() @ b for a, b in pairs])
    w = weight.double() if transposed else weight.double().transpose(1, 2)
    product = torch.cat([rows @ w[e] for e, rows in enumerate(x.double().split(counts))])
    input_grad = torch.cat([rows @ w[e].t() for e, rows in enumerate(grad.double().split(counts))])
    for name, backend in backends().items():
        _poison()
        what = f"{name}, {'[L, in, out]' if transposed else '[L, out, in]'}"
        errors = {
            "product": relative_error(backend.product(x, weight, split, transposed), product),
            "input gradient": relative_error(backend.input_grad(grad, weight, split, transposed), input_grad),
        }
        own = backend.weight_grad(grad, x, split, transposed)
        errors["weight gradient"] = relative_error(own, outer)
        held(f"{what}: experts without rows get zeros", not own[[0, 3, 7]].any().item())
        held(f"{what}: rounded once", max(errors.values()) <= BF16 / 2, str(errors))
        total = before.clone()
        backend.add_weight_grad(total, grad, x, split, transposed)
        error = relative_error(total, before.double() + outer)
        held(f"{what}: accumulated into float32", error <= FLOAT32, f"{error:.1e}")
    for name, add in {"GEMM an expert": gemm.add_outer, "Triton": _triton}.items():
        total = before.clone()
        add(total, left, right, split)
        error = relative_error(total, before.double() + outer)
        held(f"{name}: accumulated into float32", error <= FLOAT32, f"{error:.1e}")
    peak = _extra_bytes(lambda: gemm.add_outer(total, left, right, split))
    say(f"        torch.addmm adds bf16 products to float32 directly: {gemm._adds_to_float32(torch.bfloat16, DEVICE)}")
    held("GEMM an expert: no temporary of weight size", peak <= before[0].nbytes, f"{peak / 2**20:.1f} MiB")


def _triton(total: Tensor, left: Tensor, right: Tensor, split: Split) -> None:
    wgrad_kernels.add_outer(total, left, right, split.offsets_L)


def _poison() -> None:
    """Freed memory full of NaN: what a kernel leaves out shows."""
    torch.full((64 * 2**20,), float("nan"), device=DEVICE)


def _extra_bytes(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# -- two layers that share weights, a third of its own, three micro-batches


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Experts(D, I, E, 0.03) for _ in range(3)])
        self.experts[1].gate_up_proj, self.experts[1].down_proj = (
            self.experts[0].gate_up_proj,
            self.experts[0].down_proj,
        )

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for experts in self.experts:
            x = x + experts(x, index, weights)
        return x


def gradients(dtype: torch.dtype = torch.bfloat16, recipe: object = None, **options: object) -> dict[str, Tensor]:
    """Of three micro-batches, by parameter; expert 5 gets no token."""
    torch.manual_seed(0)
    model = Stack().to(DEVICE, torch.bfloat16).to(dtype)
    parallel = parallelize(model, WORLD, **options)
    for micro in range(3):
        generator = torch.Generator().manual_seed(100 * micro + RANK)
        scores = torch.rand(TOKENS, E, generator=generator)
        scores[:, 5] = -1
        x = torch.randn(TOKENS, D, generator=generator).bfloat16().to(DEVICE, dtype).requires_grad_()
        weights = torch.rand(TOKENS, TOP_K, generator=generator).to(DEVICE).requires_grad_()
        with _fp8(recipe):
            out = model(x, scores.topk(TOP_K).indices.to(DEVICE), weights)
        out.float().square().mean().backward()
        parallel.queue.flush()
        parallel.queue.assert_empty()
    found = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad, "weights": weights.grad}
    parallel.mesh.destroy()
    return found


def _fp8(recipe: object):
    if recipe is None:
        return torch.enable_grad()
    import transformer_engine.pytorch as te

    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def same(what: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    different = [name for name, grad in one.items() if not torch.equal(grad, other[name])]
    held(f"{what}: the same bits", not different, ", ".join(different))


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(relative_error(got[name], want[name]) for name in want)


def check_gradients() -> None:
    exact = gradients(torch.float32)
    plain: dict[str, dict[str, Tensor]] = {}
    for name in backends():
        options = {"experts_implementation": name}
        plain[name] = gradients(**options)
        fused = gradients(**options, gradient_accumulation_fusion=True)
        same(f"{name}, delayed", plain[name], gradients(**options, delay_wgrad_compute=True))
        same(
            f"{name}, fused and delayed",
            fused,
            gradients(**options, delay_wgrad_compute=True, gradient_accumulation_fusion=True),
        )
        errors = worst(plain[name], exact), worst(fused, exact)
        kinds = {str(g.dtype)[6:] for n, g in fused.items() if "proj" in n}
        held(f"{name}: bf16 against float32", max(errors) <= 4 * BF16, f"plain {errors[0]:.1e}, fused {errors[1]:.1e}")
        held(f"{name}: fused gradients are float32", kinds == {"float32"}, str(kinds))
    if "transformer_engine" in plain:
        error = worst(plain["transformer_engine"], plain["grouped_mm"])
        held("transformer_engine against grouped_mm", error <= 2 * BF16, f"{error:.1e}")


def check_fp8() -> None:
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

    plain = gradients()
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        name = type(recipe).__name__
        rounded = gradients(recipe=recipe, experts_implementation="transformer_engine")
        error = worst(rounded, plain)
        held(f"FP8 {name} against bf16", 1e-3 < error <= 2 * FP8, f"{error:.1e}")
        both = {"delay_wgrad_compute": True, "experts_implementation": "transformer_engine"}
        same(f"FP8 {name}, delayed", rounded, gradients(recipe=recipe, **both))


# -- under the Trainer


def check_training() -> None:
    """Ten steps of four micro-batches: tied, frozen and unused experts; every step's gradients, and the parameters."""
    from tests.strategy.wgrad_runs import fit

    overlap = {"overlap_moe_expert_parallel_comm": True}
    for name in backends():
        for fuse in (False, True):
            base = {"experts_implementation": name, "gradient_accumulation_fusion": fuse}
            plain = fit(base, 4, precision="bf16-true", **DEVICES)
            variants = {
                "1f1b, delayed": {**overlap, "delay_wgrad_compute": True},
                "1f1b, delayed, early buckets": {**overlap, "delay_wgrad_compute": True, "overlap_grad_reduce": True},
                "small sibling": {"overlap_dispatch_backward_with_experts_wgrad": True},
            }
            for variant, options in variants.items():
                other = fit({**base, **options}, 4, precision="bf16-true", **DEVICES)
                ok = torch.equal(plain["losses"], other["losses"]) and not any(other["waiting"])
                for one, two in zip(
                    [*plain["gradients"], plain["params"]], [*other["gradients"], other["params"]], strict=True
                ):
                    ok = ok and one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
                held(f"Trainer, {name}{', fused' * fuse}, {variant}: losses, gradients, parameters the same bits", ok)


FAILED: list[bool] = []

if __name__ == "__main__":
    start()
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {WORLD} ranks; backends {', '.join(backends())}")
    attempt("products", lambda: check_products(transposed=False))
    attempt("products of transposed weights", lambda: check_products(transposed=True))
    attempt("gradients", check_gradients)
    if is_available("transformer_engine"):
        attempt("FP8", check_fp8)
    if WORLD == 2:
        attempt("training", check_training)
    say("all held" if not any(FAILED) else f"{sum(FAILED)} lines FAILED")
    dist.destroy_process_group()
    sys.exit(any(FAILED))
