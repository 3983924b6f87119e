"""Model FLOPs of a MoE decoder, from its Hugging Face config.

The formula counts what the model needs, not what an implementation does (no recompute, no padding), in the field's
convention (Megatron Core's `num_floating_point_operations`): a multiply and an add are 2 FLOPs, only matrix products
count, causal attention needs half of the square, and the backward costs twice the forward. Per token, forward:

    attention projections   2 H (2 A d + 2 G d)             H hidden, A heads, G key-value heads, d head size
    attention core          2 A d S                         S sequence length: (q k + p v) x S / 2 keys on average
    active experts          K 2 3 H I                       K experts a token, I expert size, gate, up and down
    shared / dense MLP      2 3 H J                         J its size
    router                  2 H E                           E experts
    lm head                 2 H V                           V vocabulary, once a model

Megatron Core leaves the router out; for Qwen3-30B-A3B at 4,096 tokens that is 0.3% of the total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Forward once, backward for inputs and for weights.
_TRAINING = 3


@dataclass(frozen=True)
class FlopsPerToken:
    """Forward FLOPs of one token, by part; summed over layers."""

    attention_projections: float
    attention_core: float
    experts: float
    dense_mlp: float  # shared experts and dense layers
    router: float
    lm_head: float

    @property
    def forward(self) -> float:
        return (
            self.attention_projections
            + self.attention_core
            + self.experts
            + self.dense_mlp
            + self.router
            + self.lm_head
        )

    @property
    def training(self) -> float:
        """Forward and backward."""
        return _TRAINING * self.forward


def flops_per_token(config: Any, sequence_length: int) -> FlopsPerToken:
    """Model FLOPs of one token in a sequence of `sequence_length`.

    Args:
        config: a Hugging Face config of a decoder with experts, or any object with the same attributes.
        sequence_length: tokens a sequence; what attention's cost depends on.

    Raises:
        ValueError: the formula does not cover this model (no experts, linear attention); it says which attribute.
    """
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    hidden, layers = config.hidden_size, config.num_hidden_layers
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    top_k = _first(config, "num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
    if not experts or not top_k:
        raise ValueError(f"{type(config).__name__} names no number of experts or of experts per token")
    size = _first(config, "moe_intermediate_size") or config.intermediate_size
    shared = (_first(config, "n_shared_experts", "moe_num_shared_experts") or 0) * size
    shared = _first(config, "shared_expert_intermediate_size", "shared_intermediate_size") or shared
    sparse = sum(_is_sparse(config, layer) for layer in range(layers))
    projections, score_width = _attention(config)
    return FlopsPerToken(
        attention_projections=2.0 * layers * projections,
        attention_core=2.0 * score_width * sum(_keys(config, layer, sequence_length) for layer in range(layers)),
        experts=2.0 * sparse * top_k * 3 * hidden * size,
        dense_mlp=2.0 * 3 * hidden * (sparse * shared + (layers - sparse) * (config.intermediate_size or 0)),
        router=2.0 * sparse * hidden * experts,
        lm_head=2.0 * hidden * config.vocab_size,
    )


def tflops_per_gpu(flops_per_step: float, step_seconds: float, gpus: int) -> float:
    """Model TFLOP/s of one GPU, from the FLOPs of a whole step of all GPUs."""
    return flops_per_step / step_seconds / gpus / 1e12


def _attention(config: Any) -> tuple[float, float]:
    """(weights of one layer's projections, multiply-adds a query spends on one key)."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if rank := _first(config, "kv_lora_rank"):  # multi-head latent attention
        rope, nope, value = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
        q_rank = _first(config, "q_lora_rank")
        query = q_rank * (hidden + heads * (nope + rope)) if q_rank else hidden * heads * (nope + rope)
        key_value = hidden * (rank + rope) + rank * heads * (nope + value)
        return query + key_value + heads * value * hidden, heads * (nope + rope + value)
    head = _first(config, "head_dim") or hidden // heads
    groups = _first(config, "num_key_value_heads") or heads
    return 2 * hidden * head * (heads + groups), 2 * heads * head


def _keys(config: Any, layer: int, length: int) -> float:
    """Keys that a query of this layer sees on average."""
    kinds = _first(config, "layer_types")
    kind = kinds[layer] if kinds else "full_attention"
    if kind == "sliding_attention" and (window := _first(config, "sliding_window")) and window < length:
        return window - window * window / (2 * length)
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"the FLOP formula does not cover layer_types[{layer}]={kind!r}; pass flops_per_token yourself"
        )
    return length / 2


def _is_sparse(config: Any, layer: int) -> bool:
    if layer < (_first(config, "first_k_dense_replace", "moe_layer_start_index") or 0):
        return False
    if layer in (_first(config, "mlp_only_layers") or ()):
        return False
    every = _first(config, "decoder_sparse_step", "moe_layer_interval", "moe_layer_freq") or 1
    return (layer + 1) % every == 0 if isinstance(every, int) else bool(every[layer])


def _first(config: Any, *names: str) -> Any:
    """The first of these attributes that is there and not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
