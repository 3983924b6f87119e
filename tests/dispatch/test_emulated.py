"""The emulated fabric computes what its docstring says: expert e shares its weights with all experts e + i L."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ep.bench.simulate import EmulatedStrategy, parse_quantity
from lightning_ep.dispatch.emulated import EmulatedFabric
from tests.distributed import run_distributed
from tests.reference import rank_loss, tiny_model, tokens
from tests.trained import CausalLM, loader, quiet_trainer

SIZE, LOCAL = 4, 2


def _emulated(overlap: bool) -> tuple[list[float], dict[str, Tensor]]:
    module = CausalLM(tiny_model("qwen3_moe"), lr=0.0, optimizer="sgd")
    strategy = EmulatedStrategy(
        EmulatedFabric(SIZE, bandwidth=1e9, latency=0.0), overlap_moe_expert_parallel_comm=overlap
    )
    quiet_trainer(strategy=strategy, accumulate_grad_batches=2, precision="32-true", use_distributed_sampler=False).fit(
        module, loader(1, 2)
    )
    return [loss.item() for loss in module.losses], module.first_grads


def test_emulated_is_a_model_with_shared_experts() -> None:
    model = tiny_model("qwen3_moe")
    for name, parameter in model.named_parameters():
        if "experts." in name:
            parameter.data = parameter.data[:LOCAL].repeat(SIZE, 1, 1)
    losses = []
    for micro in range(2):
        loss = rank_loss(model, tokens(0, micro, 0))
        (loss / 2).backward()
        losses.append(loss.item())
    for overlap in (False, True):
        ((emulated_losses, grads),) = run_distributed(_emulated, 1, overlap)
        torch.testing.assert_close(emulated_losses, losses, rtol=1e-5, atol=0)
        for name, parameter in model.named_parameters():
            want = parameter.grad
            if "experts." in name:
                want = want.view(SIZE, LOCAL, *want.shape[1:]).sum(0)
            torch.testing.assert_close(grads[name], want, rtol=1e-4, atol=1e-6)


def test_fabric_time_is_bytes_over_bandwidth_plus_latency() -> None:
    assert EmulatedFabric(16, bandwidth=50e9, latency=20e-6).seconds(100_000_000) == 0.00202
    assert parse_quantity("50GB/s", {"GB/s": 1e9}) == 50e9
    assert parse_quantity("20us", {"us": 1e-6}) == 20 * 1e-6
