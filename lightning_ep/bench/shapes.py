"""Models of published shapes, cut to a few layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def qwen3_30b_a3b(num_layers: int, vocab_size: int = 1024, **overrides: Any) -> nn.Module:
    """Qwen3-30B-A3B's decoder layers (hidden 2048, 32/4 heads of 128, 128 experts of 768, top-8) with a small vocabulary.

    Built on torch's default device in its default dtype. Source of the shape: the model's public configuration.
    """
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=vocab_size, hidden_size=2048, num_hidden_layers=num_layers, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        intermediate_size=6144, norm_topk_prob=True, use_cache=False, **overrides,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(
        torch.get_default_dtype()
    )
