"""Rules of `delay_wgrad_compute` and its small sibling, `overlap_dispatch_backward_with_experts_wgrad`."""

from __future__ import annotations

from lightning_ep.facts import Facts
from lightning_ep.rule import BRIDGE, CORE, Rule, older, te_experts


def _wgrad_in_graph(f: Facts) -> bool:
    """Delayed weight gradients inside a CUDA graph: of attention, or of a shared expert captured with the router."""
    shared = f.moe_shared_expert_intermediate_size is not None and not f.moe_shared_expert_overlap
    return f.delay_wgrad_compute and ("attn" in f.cuda_graph_scope or ("moe_router" in f.cuda_graph_scope and shared))


WGRAD = (
    Rule(
        "wgrad-needs-overlap",
        "error",
        ("delay_wgrad_compute", "overlap_moe_expert_parallel_comm"),
        lambda f: f.delay_wgrad_compute and not f.overlap_moe_expert_parallel_comm,
        "an assertion that overlap_moe_expert_parallel_comm is required",
        "delayed weight gradients fill the exchanges that the overlap schedule leaves",
        "set overlap_moe_expert_parallel_comm=True, or take overlap_dispatch_backward_with_experts_wgrad=True alone",
        BRIDGE,
    ),
    Rule(
        "wgrad-excludes-dispatch-backward",
        "error",
        ("overlap_dispatch_backward_with_experts_wgrad", "delay_wgrad_compute"),
        lambda f: f.delay_wgrad_compute and f.overlap_dispatch_backward_with_experts_wgrad,
        "weight gradients computed twice, or never",
        "both delay the same weight gradients",
        "keep one of the two",
        CORE,
    ),
    Rule(
        "dispatch-backward-excludes-overlap",
        "error",
        ("overlap_dispatch_backward_with_experts_wgrad", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_dispatch_backward_with_experts_wgrad and f.overlap_moe_expert_parallel_comm,
        "an assertion on the two overlaps",
        "it is for an ordinary backward; under the overlap schedule delay_wgrad_compute does the same",
        "set delay_wgrad_compute=True instead, or overlap_moe_expert_parallel_comm=False",
        CORE,
    ),
    Rule(
        "dispatch-backward-te-version",
        "error",
        ("te_version", "experts_implementation", "overlap_dispatch_backward_with_experts_wgrad"),
        lambda f: f.overlap_dispatch_backward_with_experts_wgrad and te_experts(f) and older(f.te_version, "2.3.0"),
        "a TypeError for an argument that GroupedLinear does not have",
        "Transformer Engine delays weight gradients from 2.3.0 on",
        "upgrade to transformer-engine >= 2.3.0, or set experts_implementation='grouped_mm'",
        CORE,
    ),
    Rule(
        "wgrad-grad-reduce-te-version",
        "error",
        ("te_version", "overlap_grad_reduce", "experts_implementation", "delay_wgrad_compute"),
        lambda f: f.delay_wgrad_compute and f.overlap_grad_reduce and te_experts(f) and older(f.te_version, "2.7.0"),
        "gradients reduced before they exist",
        "overlapping the reduction with delayed weight gradients needs hooks that Transformer Engine has from 2.7.0 on",
        "upgrade to transformer-engine >= 2.7.0, or set overlap_grad_reduce=False or "
        "experts_implementation='grouped_mm'",
        BRIDGE,
    ),
    Rule(
        "wgrad-fusion-te-version",
        "error",
        ("te_version", "gradient_accumulation_fusion", "experts_implementation", "delay_wgrad_compute"),
        lambda f: (
            f.delay_wgrad_compute and f.gradient_accumulation_fusion and te_experts(f) and older(f.te_version, "2.7.0")
        ),
        "gradients lost or written to the wrong buffer",
        "fused accumulation of delayed weight gradients works in Transformer Engine from 2.7.0 on",
        "upgrade to transformer-engine >= 2.7.0, or set gradient_accumulation_fusion=False or "
        "experts_implementation='grouped_mm'",
        BRIDGE,
    ),
    Rule(
        "fusion-float32-torch-version",
        "error",
        ("torch_version", "gradient_accumulation_fusion", "precision"),
        lambda f: (
            f.gradient_accumulation_fusion
            and f.precision in ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16")
            and older(f.torch_version, "2.10.0")
        ),
        "gradients of micro-batches rounded to half precision one after the other",
        "half-precision parameters can have float32 gradients to accumulate into from PyTorch 2.10 on",
        "upgrade to torch >= 2.10.0, set precision='bf16-mixed', or gradient_accumulation_fusion=False",
        "PyTorch, Tensor.grad_dtype",
    ),
    Rule(
        "wgrad-cuda-graph-te-version",
        "error",
        ("te_version", "cuda_graph_scope", "experts_implementation", "delay_wgrad_compute"),
        lambda f: (
            f.delay_wgrad_compute and bool(f.cuda_graph_scope) and te_experts(f) and older(f.te_version, "2.10.0")
        ),
        "a capture that fails",
        "delayed weight gradients beside any CUDA graph need Transformer Engine 2.10.0",
        "upgrade to transformer-engine >= 2.10.0, or set cuda_graph_scope to nothing",
        CORE,
    ),
    Rule(
        "wgrad-in-graph-te-version",
        "error",
        ("te_version", "cuda_graph_scope", "experts_implementation", "moe_shared_expert_intermediate_size"),
        lambda f: _wgrad_in_graph(f) and te_experts(f) and older(f.te_version, "2.12.0"),
        "a capture that fails",
        "delayed weight gradients inside a graph (attention, or a shared expert captured with the router) need "
        "Transformer Engine 2.12.0",
        "upgrade to transformer-engine >= 2.12.0, or take 'attn' and 'moe_router' out of cuda_graph_scope",
        BRIDGE,
    ),
    Rule(
        "wgrad-in-graph-fusion",
        "error",
        ("gradient_accumulation_fusion", "cuda_graph_scope", "moe_shared_expert_intermediate_size"),
        lambda f: _wgrad_in_graph(f) and not f.gradient_accumulation_fusion,
        "gradients written to addresses that the graph's replay does not know",
        "plain accumulation has no fixed addresses, which a CUDA graph needs",
        "set gradient_accumulation_fusion=True, or take 'attn' and 'moe_router' out of cuda_graph_scope",
        BRIDGE,
    ),
    Rule(
        "wgrad-in-graph-bias",
        "error",
        ("add_bias_linear", "add_qkv_bias", "cuda_graph_scope", "delay_wgrad_compute"),
        lambda f: f.delay_wgrad_compute and "attn" in f.cuda_graph_scope and bool(f.add_bias_linear or f.add_qkv_bias),
        "an assertion on attention bias",
        "delayed weight gradients in a graph over attention do not support a linear or QKV bias",
        "take 'attn' out of cuda_graph_scope, or use a model without attention biases",
        BRIDGE,
    ),
)
