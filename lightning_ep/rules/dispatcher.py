"""Rules of the dispatchers: backends, hardware, libraries."""

from __future__ import annotations

from lightning_ep.facts import ABSENT, Facts, capability
from lightning_ep.flex import BACKENDS, gpus_of, supports
from lightning_ep.rule import CORE, Rule, older, te_experts

# HybridEP's queue pairs hold 3 x tokens + 1 requests, fewer than 65,536; it counts tokens in blocks of 64.
_HYBRIDEP_TOKENS = 21_824


def _flex(f: Facts, backend: str) -> bool:
    return f.moe_token_dispatcher_type == "flex" and f.moe_flex_dispatcher_backend == backend


def _across_nodes(f: Facts) -> bool:
    if not f.num_nodes or not f.world_size:
        return False
    return f.num_nodes > 1 and f.expert_model_parallel_size > f.world_size // f.num_nodes


DISPATCHER = (
    Rule(
        "flex-needs-backend",
        "error",
        ("moe_flex_dispatcher_backend", "moe_token_dispatcher_type"),
        lambda f: f.moe_token_dispatcher_type == "flex" and f.moe_flex_dispatcher_backend not in BACKENDS,
        "flex without a library to move tokens",
        "the flex dispatcher is a frame around DeepEP or HybridEP",
        "set moe_flex_dispatcher_backend='deepep' or 'hybridep', or moe_token_dispatcher_type='alltoall'",
        CORE,
    ),
    Rule(
        "backend-not-active",
        "warning",
        ("moe_flex_dispatcher_backend", "moe_token_dispatcher_type"),
        lambda f: f.moe_flex_dispatcher_backend is not None and f.moe_token_dispatcher_type == "alltoall",
        "throughput does not rise with flex",
        "flex configured but not active: a backend alone does not switch dispatchers",
        "set moe_token_dispatcher_type='flex' too, or take the backend away",
        "Megatron Bridge, flex dispatcher backend",
    ),
    Rule(
        "hybridep-token-limit",
        "error",
        ("tokens_per_rank", "expert_model_parallel_size", "num_nodes", "world_size"),
        lambda f: _flex(f, "hybridep") and _across_nodes(f) and (f.tokens_per_rank or 0) > _HYBRIDEP_TOKENS,
        "all ranks abort: Assertion `tx_depth > 0 && tx_depth < 65536' failed",
        "across nodes HybridEP needs 3 x tokens + 1 below 65,536, tokens in blocks of 64: at most 21,824 a rank and "
        "micro-batch",
        "lower the batch size or the sequence length and raise accumulate_grad_batches",
        "Megatron-LM issue 3999",
    ),
    Rule(
        "deepep-gpu",
        "error",
        ("gpu_name", "gpu_capability", "moe_flex_dispatcher_backend"),
        lambda f: _flex(f, "deepep") and supports("deepep", f.gpu_name, capability(f)) is False,
        "DeepEP silently skipped, or kernels that do not load",
        f"DeepEP runs on {gpus_of('deepep')}",
        "set moe_token_dispatcher_type='alltoall', or moe_flex_dispatcher_backend='hybridep' on GB200 and GB300",
        "Megatron Bridge, flex dispatcher backend",
    ),
    Rule(
        "hybridep-gpu",
        "error",
        ("gpu_name", "gpu_capability", "moe_flex_dispatcher_backend"),
        lambda f: _flex(f, "hybridep") and supports("hybridep", f.gpu_name, capability(f)) is False,
        "HybridEP silently skipped, or kernels that do not load",
        f"HybridEP runs on {gpus_of('hybridep')}",
        "set moe_token_dispatcher_type='alltoall'",
        "Megatron Bridge, flex dispatcher backend",
    ),
    Rule(
        "flex-needs-gpu",
        "error",
        ("moe_token_dispatcher_type", "accelerator"),
        lambda f: f.moe_token_dispatcher_type == "flex" and f.accelerator == "cpu",
        "CUDA errors from a library on a machine without GPUs",
        "DeepEP and HybridEP are GPU kernels",
        "set moe_token_dispatcher_type='alltoall' on the CPU",
        "DeepEP",
    ),
    Rule(
        "flex-precision",
        "error",
        ("precision", "moe_flex_dispatcher_backend"),
        lambda f: f.moe_token_dispatcher_type == "flex" and (f.precision or "bf16").startswith(("16", "32", "64")),
        "an assertion of a library at the first exchange",
        "DeepEP and HybridEP move bfloat16 tokens",
        "set precision='bf16-mixed' or 'bf16-true', or moe_token_dispatcher_type='alltoall'",
        "DeepEP",
    ),
    Rule(
        "deepep-missing",
        "error",
        ("deep_ep_version", "moe_flex_dispatcher_backend"),
        lambda f: _flex(f, "deepep") and f.deep_ep_version == ABSENT,
        "ModuleNotFoundError: deep_ep",
        "the module deep_ep is not installed in this environment",
        "pip install 'lightning-ep[deepep]', check with `lightning-ep doctor`, or set "
        "moe_token_dispatcher_type='alltoall'",
        "DeepEP",
    ),
    Rule(
        "hybridep-missing",
        "error",
        ("hybrid_ep_version", "moe_flex_dispatcher_backend"),
        lambda f: _flex(f, "hybridep") and f.hybrid_ep_version == ABSENT,
        "ImportError: HybridEPBuffer",
        "the module hybrid_ep_cpp is not installed: HybridEP is the branch hybrid-ep of deepseek-ai/DeepEP",
        "build that branch for this torch and GPU, check with `lightning-ep doctor`, or set "
        "moe_token_dispatcher_type='alltoall'",
        "DeepEP, branch hybrid-ep",
    ),
    Rule(
        "te-missing",
        "error",
        ("te_version", "experts_implementation"),
        lambda f: te_experts(f) and f.te_version == ABSENT,
        "ModuleNotFoundError: transformer_engine",
        "the module transformer_engine is not installed in this environment",
        "pip install 'lightning-ep[te]', check with `lightning-ep doctor`, or set experts_implementation='grouped_mm'",
        "Transformer Engine",
    ),
    Rule(
        "te-experts-version",
        "error",
        ("te_version", "experts_implementation"),
        lambda f: te_experts(f) and f.te_version != ABSENT and older(f.te_version, "2.11.0"),
        "a TypeError in general_grouped_gemm",
        "the experts call Transformer Engine's grouped GEMM, whose arguments are these from 2.11.0 on",
        "upgrade to transformer-engine >= 2.11.0, or set experts_implementation='grouped_mm'",
        "Transformer Engine",
    ),
    Rule(
        "te-experts-gpu",
        "error",
        ("experts_implementation", "accelerator"),
        lambda f: te_experts(f) and f.accelerator == "cpu",
        "CUDA errors from a library on a machine without GPUs",
        "Transformer Engine's GEMMs are GPU kernels",
        "set experts_implementation='grouped_mm' on the CPU",
        "Transformer Engine",
    ),
    Rule(
        "te-experts-precision",
        "error",
        ("precision", "experts_implementation"),
        lambda f: te_experts(f) and f.precision is not None and f.precision.startswith(("32", "64")),
        "losses that differ in the third digit",
        "Transformer Engine multiplies float32 in TF32, and no float64 at all",
        "set precision='bf16-mixed' or 'bf16-true', or experts_implementation='grouped_mm'",
        "Transformer Engine",
    ),
)
