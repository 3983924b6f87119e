"""Real NCCL, real kernels: the EP model in bf16 and fp32 against one process on all ranks' batches.

torchrun (or on_one_gpu N) tests/gpu/check_equality.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.gpu.common import DEVICE, RANK, WORLD, parallelize, say, start
from tests.reference import rank_loss, tiny_model, tokens

# bf16 rounds every activation to 8 bits (relative 4e-3); two orders of summation differ by a few roundings.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def gradients(model: torch.nn.Module, ranks: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for rank in ranks:
        loss = rank_loss(model, tokens(0, 0, rank, batch=8).to(DEVICE))
        loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(model_type: str, dtype: torch.dtype, **options: object) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    expected_losses, expected = gradients(tiny_model(model_type, dtype).to(DEVICE), list(range(WORLD)))
    model = tiny_model(model_type, dtype).to(DEVICE)
    parallel = parallelize(model, WORLD, **options)
    (loss,), actual = gradients(model, [RANK])
    worst = abs(loss - expected_losses[RANK]) / abs(expected_losses[RANK])
    experts = parallel.expert_tensors()
    for name, parameter in model.named_parameters():
        if name not in expected:
            continue
        want, got = expected[name].float(), actual[name].float()
        if parameter in experts:
            share = parallel.mesh.local_experts(want.shape[0])
            want = want[share]
        else:
            dist.all_reduce(got)
        worst = max(worst, ((got - want).norm() / want.norm().clamp(min=1e-12)).item())
    worst_anywhere = torch.tensor(worst, device=DEVICE)
    dist.all_reduce(worst_anywhere, op=dist.ReduceOp.MAX)
    verdict = "ok" if worst_anywhere.item() <= TOLERANCE[dtype] else "FAILED"
    say(
        f"{model_type:12s} {str(dtype)[6:]:9s} world {WORLD} {options!s:60s} worst relative error {worst_anywhere.item():.1e} {verdict}"
    )
    assert verdict == "ok"
    parallel.mesh.destroy()


if __name__ == "__main__":
    start()
    for model_type in ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"):
        for dtype in (torch.float32, torch.bfloat16):
            for fusion in (False, True):
                check(model_type, dtype, moe_permute_fusion=fusion)
    check("qwen3_moe", torch.bfloat16, moe_dispatch_dedup=False)
    dist.destroy_process_group()
