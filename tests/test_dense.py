"""Fused RMSNorms: the plain ones are found, others left alone, results the same to rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_ep.dense import fuse_rms_norms
from tests.reference import rank_loss, tiny_model, tokens


@pytest.mark.parametrize(
    "model_type, norms", [("qwen3_moe", 2 * 4 + 1), ("mixtral", 2 * 2 + 1), ("gpt_oss", 2 * 2 + 1)]
)
def test_fused_model_trains_the_same(model_type: str, norms: int) -> None:
    model = tiny_model(model_type)
    fused = copy.deepcopy(model)
    assert fuse_rms_norms(fused) == norms
    losses = [rank_loss(m, tokens(0, 0, 0)) for m in (model, fused)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for one, other in zip(model.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)


class ZeroCenteredRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (8,), 1 + self.weight, self.eps)


class GatedRMSNorm(ZeroCenteredRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * gate


def test_other_formulas_are_left_alone() -> None:
    assert fuse_rms_norms(nn.ModuleList([ZeroCenteredRMSNorm(), GatedRMSNorm()])) == 0
