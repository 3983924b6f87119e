"""Real NCCL, real kernels: the EP model in bf16 and fp32 against one process on all ranks' batches.

torchrun (or on_one_gpu N) tests/gpu/check_equality.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.gpu.common import DEVICE, RANK, WORLD, parallelize, say, start
from tests.reference import rank_loss, tiny_model, tokens

# float32: a few roundings. bf16: the error against float32 truth may be this much of the single process's own.
FLOAT32_TOLERANCE, BF16_RATIO = 2e-5, 1.5


def gradients(model: torch.nn.Module, ranks: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for rank in ranks:
        loss = rank_loss(model, tokens(0, 0, rank, batch=8).to(DEVICE))
        loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Over all parameters together: a token that a rounding sends to another expert moves one parameter a lot."""
    error = sum((got[n].double() - want[n].double()).square().sum() for n in want)
    return (error / sum(want[n].double().square().sum() for n in want)).sqrt().item()


def check(model_type: str, dtype: torch.dtype, **options: object) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    every = list(range(WORLD))
    # bf16 weights in both, so that only the arithmetic differs
    truth_losses, truth = gradients(tiny_model(model_type, dtype).to(DEVICE, torch.float32), every)
    model = tiny_model(model_type, dtype).to(DEVICE)
    parallel = parallelize(model, WORLD, **options)
    (loss,), actual = gradients(model, [RANK])
    experts = parallel.expert_tensors()
    for name, parameter in model.named_parameters():
        if name in actual and parameter in experts:
            parts = [torch.empty_like(actual[name]) for _ in range(WORLD)]
            dist.all_gather(parts, actual[name].contiguous())
            actual[name] = torch.cat(parts)
        elif name in actual:
            actual[name] = actual[name].float()
            dist.all_reduce(actual[name])
    error = max(relative_error(actual, truth), abs(loss - truth_losses[RANK]) / abs(truth_losses[RANK]))
    allowed, note = FLOAT32_TOLERANCE, ""
    if dtype != torch.float32:
        _, single = gradients(tiny_model(model_type, dtype).to(DEVICE), every)
        own = relative_error(single, truth)
        allowed, note = BF16_RATIO * own, f" (one process in {str(dtype)[6:]}: {own:.1e})"
    worst = torch.tensor(error, device=DEVICE)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    ok = worst.item() <= allowed
    say(
        f"{model_type:12s} {str(dtype)[6:]:9s} world {WORLD} {options!s:34s} relative error {worst.item():.1e}{note} "
        f"{'ok' if ok else 'FAILED'}"
    )
    FAILED.append(not ok)
    parallel.mesh.destroy()


FAILED: list[bool] = []

if __name__ == "__main__":
    start()
    for model_type in ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"):
        for dtype in (torch.float32, torch.bfloat16):
            for fusion in (False, True):
                check(model_type, dtype, moe_permute_fusion=fusion)
    check("qwen3_moe", torch.bfloat16, moe_dispatch_dedup=False)
    dist.destroy_process_group()
    assert not any(FAILED)
