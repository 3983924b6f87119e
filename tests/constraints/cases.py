"""For each rule: facts that break it, and facts at its boundary that do not."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from lightning_ep.config import EPConfig
from lightning_ep.facts import ABSENT, FACT_NAMES, Facts

# Everything known, everything allowed: 24 H100s in three nodes.
GOOD = Facts(
    expert_model_parallel_size=8,
    overlap_moe_expert_parallel_comm=True,
    num_moe_experts=64,
    recomputed_layers=0,
    mtp_num_layers=1,
    automatic_optimization=True,
    add_bias_linear=False,
    add_qkv_bias=False,
    precision="bf16-mixed",
    accumulate_grad_batches=8,
    batch_size=1,
    tokens_per_rank=4096,
    world_size=24,
    num_nodes=3,
    accelerator="cuda",
    torch_version="2.6.0",
    transformers_version="5.24.0",
    te_version="2.12.0",
    deep_ep_version="1.2.1",
    hybrid_ep_version="1.2.1",
    gpu_name="NVIDIA H100 80GB HBM3",
    gpu_capability=(9, 0),
    cuda_device_max_connections=32,
)
OBSERVED = set(FACT_NAMES) - {f.name for f in fields(EPConfig)}
TE = {"experts_implementation": "transformer_engine"}
WGRAD = {"delay_wgrad_compute": True}
GRAPH = ("cuda-graph-scope",)
GRAPHS = {"cuda_graph_scope": ("attn", "moe_router")}
OLD_TE = ("te-experts-version",)


class Case(NamedTuple):
    broken: dict[str, Any]
    kept: tuple[dict[str, Any], ...]  # at the boundary: the rule holds
    company: tuple[str, ...] = ()  # rules that cannot but be violated too


def flex(backend: str | None, **others: Any) -> dict[str, Any]:
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend} | others


CASES = {
    "overlap-needs-ep": Case({"expert_model_parallel_size": 1}, ({"expert_model_parallel_size": 2},)),
    "overlap-needs-experts": Case({"num_moe_experts": 1}, ({"num_moe_experts": 2},), ("experts-divisible",)),
    "experts-divisible": Case({"num_moe_experts": 60}, ({"num_moe_experts": 8}, {"num_moe_experts": 16})),
    "world-divisible": Case({"world_size": 28}, ({"world_size": 8}, {"world_size": 16})),
    "transformers-version": Case(
        {"transformers_version": "5.20.2"},
        tuple({"transformers_version": version} for version in ("5.21.0", "5.21.0.dev0", "6.0.0", None)),
    ),
    "overlap-dispatcher": Case(
        {"moe_token_dispatcher_type": "allgather"}, ({"moe_token_dispatcher_type": "alltoall"}, flex("deepep"))
    ),
    "overlap-precision": Case(
        {"precision": "32-true"},
        tuple({"precision": p} for p in ("bf16-mixed", "bf16-true", "16-mixed", "16-true", "bf16", "16")),
    ),
    "overlap-precision-cpu": Case(
        {"precision": "32-true", "accelerator": "cpu"}, ({"precision": "bf16-mixed", "accelerator": "cpu"},)
    ),
    "overlap-torch-version": Case(
        {"torch_version": "2.5.1"}, ({"torch_version": "2.6.0"}, {"torch_version": "2.6.0a0+nv25.1"})
    ),
    "overlap-pipeline-needs-virtual": Case(
        {"pipeline_model_parallel_size": 2},
        (
            {"pipeline_model_parallel_size": 1},
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1},
        ),
        ("no-pipeline-parallelism",),
    ),
    "overlap-full-recompute": Case(
        {"recompute_granularity": "full", "recomputed_layers": 4},
        ({"recompute_granularity": "selective"}, {"recompute_granularity": None}),
    ),
    "overlap-recompute-method": Case(
        {"recompute_method": "uniform"}, ({"recompute_method": None},), ("recompute-is-the-models",)
    ),
    "overlap-recompute-num-layers": Case(
        {"recompute_num_layers": 1}, ({"recompute_num_layers": None},), ("recompute-is-the-models",)
    ),
    "overlap-recompute-moe": Case(
        {"recompute_modules": ("core_attn", "moe")},
        ({"recompute_modules": ("core_attn",)}, {"recompute_modules": ("moe_act",)}),
        ("recompute-is-the-models",),
    ),
    "overlap-shared-expert-overlap": Case({"moe_shared_expert_overlap": True}, ({"moe_shared_expert_overlap": False},)),
    "overlap-mtp-layers": Case({"mtp_num_layers": 2}, tuple({"mtp_num_layers": n} for n in (None, 0, 1))),
    "overlap-cuda-graph-moe": Case(
        {"cuda_graph_scope": ("mlp",)}, ({"cuda_graph_scope": ("moe_router",)}, {"cuda_graph_scope": ()}), GRAPH
    ),
    "overlap-nothing-to-overlap": Case(
        {"accumulate_grad_batches": 1, "batch_size": 1},
        ({"accumulate_grad_batches": 2, "batch_size": 1}, {"accumulate_grad_batches": 1, "batch_size": 2}),
        ("overlap-few-microbatches",),
    ),
    "overlap-1f1b-manual": Case(
        {"overlap_schedule": "1f1b", "automatic_optimization": False},
        (
            {"overlap_schedule": "1f1b", "automatic_optimization": True},
            {"overlap_schedule": "two_batch", "automatic_optimization": False, "batch_size": 2},
        ),
    ),
    "overlap-one-connection": Case(
        {"cuda_device_max_connections": 1},
        (
            {"cuda_device_max_connections": 2},
            {"cuda_device_max_connections": 1, "gpu_capability": (10, 0), "gpu_name": "NVIDIA B200"},
        ),
    ),
    "overlap-small-ep": Case(
        {"expert_model_parallel_size": 4, "num_nodes": 2},
        (
            {"expert_model_parallel_size": 8, "num_nodes": 2},
            {"expert_model_parallel_size": 4, "num_nodes": 3},
            flex("deepep", expert_model_parallel_size=4, num_nodes=2),
        ),
    ),
    "overlap-few-microbatches": Case({"accumulate_grad_batches": 3}, ({"accumulate_grad_batches": 4},)),
    "wgrad-needs-overlap": Case(WGRAD | {"overlap_moe_expert_parallel_comm": False}, (WGRAD,)),
    "wgrad-excludes-dispatch-backward": Case(
        WGRAD | {"overlap_dispatch_backward_with_experts_wgrad": True},
        (WGRAD,),
        ("dispatch-backward-excludes-overlap",),
    ),
    "dispatch-backward-excludes-overlap": Case(
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        ({"overlap_dispatch_backward_with_experts_wgrad": True, "overlap_moe_expert_parallel_comm": False},),
    ),
    "dispatch-backward-te-version": Case(
        TE
        | {"overlap_dispatch_backward_with_experts_wgrad": True, "overlap_moe_expert_parallel_comm": False}
        | {"te_version": "2.2.0"},
        (
            TE
            | {"overlap_dispatch_backward_with_experts_wgrad": True, "overlap_moe_expert_parallel_comm": False}
            | {"te_version": "2.3.0"},
        ),
        OLD_TE,
    ),
    "wgrad-grad-reduce-te-version": Case(
        WGRAD | TE | {"overlap_grad_reduce": True, "te_version": "2.6.0"},
        (
            WGRAD | TE | {"overlap_grad_reduce": True, "te_version": "2.7.0"},
            WGRAD | {"overlap_grad_reduce": True, "te_version": "2.6.0"},
            WGRAD | TE | {"te_version": "2.6.0"},
        ),
        OLD_TE,
    ),
    "wgrad-fusion-te-version": Case(
        WGRAD | TE | {"gradient_accumulation_fusion": True, "te_version": "2.6.0"},
        (
            WGRAD | TE | {"gradient_accumulation_fusion": True, "te_version": "2.7.0"},
            WGRAD | {"gradient_accumulation_fusion": True, "te_version": "2.6.0"},
        ),
        OLD_TE,
    ),
    "fusion-float32-torch-version": Case(
        {"gradient_accumulation_fusion": True, "precision": "bf16-true", "torch_version": "2.9.1"},
        (
            {"gradient_accumulation_fusion": True, "precision": "bf16-true", "torch_version": "2.10.0"},
            {"gradient_accumulation_fusion": True, "precision": "bf16-mixed", "torch_version": "2.9.1"},
            {"precision": "bf16-true", "torch_version": "2.9.1"},
        ),
    ),
    "wgrad-cuda-graph-te-version": Case(
        WGRAD | TE | {"cuda_graph_scope": ("moe_preprocess",), "te_version": "2.9.0"},
        (
            WGRAD | TE | {"cuda_graph_scope": ("moe_preprocess",), "te_version": "2.10.0"},
            WGRAD | {"cuda_graph_scope": ("moe_preprocess",), "te_version": "2.9.0"},
        ),
        GRAPH + OLD_TE,
    ),
    "wgrad-in-graph-te-version": Case(
        WGRAD | TE | {"cuda_graph_scope": ("attn",), "gradient_accumulation_fusion": True, "te_version": "2.11.0"},
        (
            WGRAD | TE | {"cuda_graph_scope": ("attn",), "gradient_accumulation_fusion": True, "te_version": "2.12.0"},
            # Without a shared expert the router's graph holds no delayed weight gradient.
            WGRAD | TE | {"cuda_graph_scope": ("moe_router",), "te_version": "2.11.0"},
            WGRAD | {"cuda_graph_scope": ("attn",), "gradient_accumulation_fusion": True, "te_version": ABSENT},
        ),
        GRAPH,
    ),
    "wgrad-in-graph-fusion": Case(
        WGRAD | {"cuda_graph_scope": ("moe_router",), "moe_shared_expert_intermediate_size": 512},
        (
            WGRAD
            | {"cuda_graph_scope": ("moe_router",), "moe_shared_expert_intermediate_size": 512}
            | {"gradient_accumulation_fusion": True},
            WGRAD
            | {"cuda_graph_scope": ("moe_router",), "moe_shared_expert_intermediate_size": 512}
            | {"moe_shared_expert_overlap": True},
        ),
        GRAPH,
    ),
    "wgrad-in-graph-bias": Case(
        WGRAD | {"cuda_graph_scope": ("attn",), "gradient_accumulation_fusion": True, "add_qkv_bias": True},
        (
            WGRAD | {"cuda_graph_scope": ("attn",), "gradient_accumulation_fusion": True},
            WGRAD | {"cuda_graph_scope": ("moe_router",), "add_qkv_bias": True},
        ),
        GRAPH,
    ),
    "flex-needs-backend": Case(flex(None), (flex("deepep"), flex("hybridep"))),
    "backend-not-active": Case({"moe_flex_dispatcher_backend": "deepep"}, (flex("deepep"),)),
    "hybridep-token-limit": Case(
        flex("hybridep", tokens_per_rank=21_825, expert_model_parallel_size=16, world_size=48, num_nodes=6),
        (
            flex("hybridep", tokens_per_rank=21_824, expert_model_parallel_size=16, world_size=48, num_nodes=6),
            # One node an expert-parallel group: no network, no limit.
            flex("hybridep", tokens_per_rank=21_825, expert_model_parallel_size=8, world_size=48, num_nodes=6),
            flex("deepep", tokens_per_rank=21_825, expert_model_parallel_size=16, world_size=48, num_nodes=6),
        ),
    ),
    "deepep-gpu": Case(
        flex("deepep", gpu_name="NVIDIA GB200", gpu_capability=(10, 0)),
        (
            flex("deepep", gpu_name="NVIDIA B200", gpu_capability=(10, 0)),
            flex("deepep", gpu_name="NVIDIA A100-SXM4-80GB", gpu_capability=(8, 0)),
            flex("hybridep", gpu_name="NVIDIA GB200", gpu_capability=(10, 0)),
        ),
    ),
    "hybridep-gpu": Case(
        flex("hybridep", gpu_name="Tesla V100-SXM2-16GB", gpu_capability=(7, 0)),
        (
            flex("hybridep", gpu_name="NVIDIA A100-SXM4-80GB", gpu_capability=(8, 0)),
            flex("hybridep", gpu_name="NVIDIA GB300", gpu_capability=(10, 3)),
        ),
    ),
    "flex-needs-gpu": Case(flex("deepep", accelerator="cpu"), (flex("deepep", accelerator="cuda"),)),
    "flex-precision": Case(
        flex("hybridep", precision="16-mixed"),
        (flex("deepep", precision="bf16-true"), flex("hybridep", precision="bf16-mixed"), {"precision": "16-mixed"}),
    ),
    "deepep-missing": Case(
        flex("deepep", deep_ep_version=ABSENT), (flex("deepep", deep_ep_version="1.2.1"), {"deep_ep_version": ABSENT})
    ),
    "hybridep-missing": Case(
        flex("hybridep", hybrid_ep_version=ABSENT), (flex("deepep", hybrid_ep_version=ABSENT), flex("hybridep"))
    ),
    "te-missing": Case(TE | {"te_version": ABSENT}, (TE | {"te_version": "2.11.0"}, {"te_version": ABSENT})),
    "te-experts-version": Case(
        TE | {"te_version": "2.10.0"}, (TE | {"te_version": "2.11.0"}, {"te_version": "2.10.0"})
    ),
    "te-experts-gpu": Case(TE | {"accelerator": "cpu"}, (TE, {"accelerator": "cpu"})),
    "te-experts-precision": Case(
        TE | {"precision": "32-true", "overlap_moe_expert_parallel_comm": False},
        (TE | {"precision": "16-mixed"}, TE | {"precision": "transformer-engine"}),
    ),
    "cuda-graph-scope": Case(
        {"cuda_graph_scope": ("attn",)}, ({"cuda_graph_scope": ()}, {"cuda_graph_scope": ("moe_router", "attn")})
    ),
    "cuda-graph-gpu": Case(
        GRAPHS | {"accelerator": "cpu"}, (GRAPHS | {"accelerator": "cuda"}, {"accelerator": "cpu"}, GRAPHS)
    ),
    "cuda-graph-use-cache": Case(GRAPHS | {"use_cache": True}, (GRAPHS | {"use_cache": False}, {"use_cache": True})),
    "cuda-graph-router-logits": Case(
        GRAPHS | {"output_router_logits": True},
        (GRAPHS | {"output_router_logits": False}, {"output_router_logits": True}),
    ),
    "checkpoint-dir-remote": Case(
        {"checkpoint_dir": "s3://bucket/run"},
        tuple({"checkpoint_dir": path} for path in ("/data/run", "s3/run", "runs/3:/x", "C:/runs", None)),
    ),
    "checkpoint-io": Case({"checkpoint_io": "AsyncCheckpointIO"}, ({"checkpoint_io": None},)),
    "no-other-dispatchers": Case(
        {"moe_token_dispatcher_type": "allgather", "overlap_moe_expert_parallel_comm": False},
        ({"moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": False},),
    ),
    "no-shared-expert-overlap": Case(
        {"moe_shared_expert_overlap": True, "overlap_moe_expert_parallel_comm": False},
        ({"moe_shared_expert_overlap": False, "overlap_moe_expert_parallel_comm": False},),
    ),
    "recompute-is-the-models": Case({"recompute_granularity": "selective"}, ({"recompute_granularity": None},)),
    "no-pipeline-parallelism": Case(
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        ({"pipeline_model_parallel_size": 1},),
    ),
    "no-tensor-parallelism": Case({"tensor_model_parallel_size": 2}, ({"tensor_model_parallel_size": 1},)),
}


# Some rules exclude each other (with overlap and without, flex and alltoall), so "all at once" takes several runs.
EVERYTHING = (
    dict(
        expert_model_parallel_size=3,
        overlap_moe_expert_parallel_comm=True,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="hybridep",
        delay_wgrad_compute=True,
        overlap_dispatch_backward_with_experts_wgrad=True,
        overlap_grad_reduce=True,
        moe_shared_expert_overlap=True,
        experts_implementation="transformer_engine",
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=2,
        recompute_modules=("moe",),
        recomputed_layers=0,
        pipeline_model_parallel_size=2,
        tensor_model_parallel_size=2,
        cuda_graph_scope=("attn", "moe"),
        use_cache=True,
        output_router_logits=True,
        num_moe_experts=1,
        mtp_num_layers=2,
        add_qkv_bias=True,
        precision="32-true",
        accumulate_grad_batches=1,
        batch_size=1,
        tokens_per_rank=30_000,
        world_size=4,
        num_nodes=2,
        torch_version="2.5.0",
        te_version=ABSENT,
        hybrid_ep_version=ABSENT,
        gpu_name="Tesla V100",
        gpu_capability=(7, 0),
        cuda_device_max_connections=1,
        overlap_schedule="1f1b",
        automatic_optimization=False,
        checkpoint_dir="gs://bucket/run",
        checkpoint_io="AsyncCheckpointIO",
        transformers_version="5.17.0",
    ),
    dict(
        expert_model_parallel_size=1,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="deepep",
        gradient_accumulation_fusion=True,
        delay_wgrad_compute=True,
        experts_implementation="transformer_engine",
        te_version="2.2.0",
        deep_ep_version=ABSENT,
        gpu_name="Tesla V100",
        gpu_capability=(7, 0),
        accelerator="cpu",
        cuda_graph_scope=("attn",),
        precision="32-true",
    ),
    dict(
        overlap_moe_expert_parallel_comm=False,
        delay_wgrad_compute=True,
        moe_shared_expert_overlap=True,
        moe_token_dispatcher_type="allgather",
    ),
    dict(expert_model_parallel_size=2, moe_flex_dispatcher_backend="deepep", num_nodes=1),
    dict(gradient_accumulation_fusion=True, precision="bf16-true"),
    dict(moe_token_dispatcher_type="allgather"),
    dict(moe_token_dispatcher_type="flex"),
)
