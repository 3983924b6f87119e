"""What CUDA graphs of the dense parts need (`cuda_graph_scope`); beside an overlap or delayed weight gradients see there."""

from __future__ import annotations

from lightning_ep.facts import Facts
from lightning_ep.rule import Rule

SCOPE = {"attn", "moe_router"}


def _graphs(f: Facts) -> bool:
    return bool(f.cuda_graph_scope)


GRAPHS = (
    Rule(
        "cuda-graph-scope",
        "error",
        ("cuda_graph_scope",),
        lambda f: _graphs(f) and set(f.cuda_graph_scope) != SCOPE,
        "an option that would have to be ignored",
        "lightning_ep records the dense parts of a layer together, and never the experts, whose shapes change",
        "set cuda_graph_scope=['attn', 'moe_router'], or to nothing",
        "lightning_ep",
    ),
    Rule(
        "cuda-graph-gpu",
        "error",
        ("cuda_graph_scope", "accelerator"),
        lambda f: _graphs(f) and f.accelerator == "cpu",
        "an option that would have to be ignored",
        "CUDA graphs need a GPU",
        "set cuda_graph_scope to nothing, or run with accelerator='cuda'",
        "lightning_ep",
    ),
    Rule(
        "cuda-graph-use-cache",
        "error",
        ("cuda_graph_scope", "use_cache"),
        lambda f: _graphs(f) and bool(f.use_cache),
        "keys and values of one micro-batch in the next one",
        "a key-value cache grows with every call, and a graph repeats the one that was recorded",
        "set use_cache=False in the model's config",
        "lightning_ep",
    ),
    Rule(
        "cuda-graph-router-logits",
        "error",
        ("cuda_graph_scope", "output_router_logits"),
        lambda f: _graphs(f) and bool(f.output_router_logits),
        "an auxiliary loss without gradient",
        "router logits are collected inside the layers, where a graph runs none of the model's code",
        "set output_router_logits=False in the model's config, or cuda_graph_scope to nothing",
        "lightning_ep",
    ),
)
