"""Experts as a user may write them: the call's signature, and nothing of transformers' layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OwnExperts(nn.Module):
    """Two layers with a bias and a scale for each expert (1-D), and one temperature for all of them."""

    def __init__(self, hidden: int, inner: int, num_experts: int) -> None:
        super().__init__()
        self.n = num_experts
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden, inner) * 0.5)
        self.b1 = nn.Parameter(torch.randn(num_experts, inner) * 0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, inner, hidden) * 0.5)
        self.scale = nn.Parameter(torch.rand(num_experts) + 0.5)
        self.temperature = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x: Tensor, expert_idx: Tensor, scores: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in expert_idx.unique().tolist():
            token, slot = torch.where(expert_idx == expert)
            hidden = torch.tanh(x[token] @ self.w1[expert] + self.b1[expert]) * self.temperature
            out = out.index_add(0, token, hidden @ self.w2[expert] * self.scale[expert] * scores[token, slot, None])
        return out


class IdExperts(nn.Module):
    """Expert e answers e + 1 times the token."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.arange(1.0, num_experts + 1).view(-1, 1, 1))

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return x * (self.factor[top_k_index, 0, 0] * top_k_weights).sum(-1, keepdim=True)
