"""The single-process reference of the distributed tests: the same Hugging Face model on the concatenated batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 64
SEQUENCE = 10

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip

# model type -> what its tiny configuration adds
TINY: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8,
        "output_router_logits": True, "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "output_router_logits": True,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": True},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8,
        "output_router_logits": True,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "num_hidden_layers": 3, "head_dim": 8, "n_group": 1, "topk_group": 1,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "num_hidden_layers": 3, "head_dim": 8,
    },
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True, "router_jitter_noise": 0.0},
    "qwen3_next": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
        "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "output_router_logits": True,
    },
}  # fmt: skip


# Gated delta rules explode with larger weights, and rounding errors with them.
_SCALE = {"qwen3_next": 0.08}


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> nn.Module:
    """A causal language model of a few thousand parameters; the same weights for the same seed."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(model_type, **{**_COMMON, **TINY[model_type], **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Larger than usual, so that routing is decided and biases (initialised to zero) take part.
            if p.dim() > 1 or "bias" in name or "sink" in name:
                p.copy_(torch.randn(p.shape) * (_SCALE.get(model_type, 0.2) if p.dim() > 1 else 0.1))
    return model.to(dtype)


def tokens(step: int, micro_batch: int, rank: int, batch: int = 2) -> Tensor:
    """The batch `[B, SEQUENCE]` that `rank` sees."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randint(3, VOCAB, (batch, SEQUENCE), generator=generator)


def rank_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Language-model loss (with the router's auxiliary loss where the model has it) of one rank's batch."""
    return model(input_ids=ids, labels=ids).loss


def reference_run(
    model: nn.Module, world_size: int, steps: int, accumulate: int, clip: float | None, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Train in one process as `world_size` data-parallel ranks would: the loss is the mean over ranks and micro-batches.

    The auxiliary loss is a mean over a rank's own tokens in data parallelism, hence a sum of per-rank losses here too.
    """
    losses, norms, grads = [], [], {}
    for step in range(steps):
        optimizer.zero_grad()
        per_rank = torch.zeros(world_size)
        for micro in range(accumulate):
            for rank in range(world_size):
                loss = rank_loss(model, tokens(step, micro, rank))
                (loss / (world_size * accumulate)).backward()
                per_rank[rank] += loss.detach().float() / accumulate
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(per_rank.tolist())
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "params": {n: p.detach() for n, p in model.named_parameters()},
    }
