"""Rules of `overlap_moe_expert_parallel_comm`, and of expert parallelism itself."""

from __future__ import annotations

from lightning_ep.facts import Facts, capability
from lightning_ep.rule import BRIDGE, CORE, DISPATCHERS, Rule, below, divides, older


def _half(precision: str) -> bool:
    return precision.startswith(("bf16", "16", "fp16", "float16", "bfloat16", "transformer-engine"))


def _wrong_precision(f: Facts) -> bool:
    return f.overlap_moe_expert_parallel_comm and f.precision is not None and not _half(f.precision)


def _nothing_to_overlap(f: Facts) -> bool:
    accumulation, batch = below(f.accumulate_grad_batches, 2), below(f.batch_size, 2)
    too_small = {"1f1b": accumulation, "two_batch": batch}.get(f.overlap_schedule, accumulation and batch)
    return f.overlap_moe_expert_parallel_comm and too_small


OVERLAP = (
    Rule(
        "overlap-needs-ep",
        "error",
        ("expert_model_parallel_size", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and f.expert_model_parallel_size <= 1,
        "an assertion on expert_model_parallel_size > 1",
        "with one expert-parallel rank no token travels, so there is nothing to hide",
        "set expert_model_parallel_size to 2 or more, or overlap_moe_expert_parallel_comm=False",
        BRIDGE,
    ),
    Rule(
        "overlap-needs-experts",
        "error",
        ("num_moe_experts", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and below(f.num_moe_experts, 2),
        "an assertion on num_moe_experts > 1",
        "a model without several experts has no exchange of tokens",
        "train an MoE model, or set overlap_moe_expert_parallel_comm=False",
        BRIDGE,
    ),
    Rule(
        "experts-divisible",
        "error",
        ("num_moe_experts", "expert_model_parallel_size"),
        lambda f: not divides(f.expert_model_parallel_size, f.num_moe_experts),
        "an error while the experts are cut, after the allocation began",
        "every rank of an expert-parallel group holds the same number of experts",
        "set expert_model_parallel_size to a divisor of the number of experts",
        CORE,
    ),
    Rule(
        "world-divisible",
        "error",
        ("world_size", "expert_model_parallel_size"),
        lambda f: not divides(f.expert_model_parallel_size, f.world_size),
        "process groups that cannot be built, or a job that waits for ranks which do not exist",
        "expert-parallel groups are whole groups of consecutive ranks",
        "set expert_model_parallel_size to a divisor of devices x num_nodes",
        CORE,
    ),
    Rule(
        "transformers-version",
        "error",
        ("transformers_version",),
        lambda f: older(f.transformers_version, "5.21.0"),
        "experts that run one after the other instead of in one grouped GEMM, and an export that fails",
        "from transformers 5.21 on experts say how their weights are laid out in the way that is read here",
        "pip install 'transformers>=5.21'",
        "lightning_ep",
    ),
    Rule(
        "overlap-dispatcher",
        "error",
        ("moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and f.moe_token_dispatcher_type not in DISPATCHERS,
        "an assertion on moe_token_dispatcher_type",
        "only the alltoall and the flex dispatcher launch and wait separately",
        "set moe_token_dispatcher_type='alltoall' or 'flex'",
        BRIDGE,
    ),
    Rule(
        "overlap-precision",
        "error",
        ("precision", "overlap_moe_expert_parallel_comm"),
        lambda f: _wrong_precision(f) and f.accelerator != "cpu",
        "an assertion on bf16 or fp16",
        "overlap is supported in bf16 and fp16, true or mixed",
        "set precision='bf16-mixed', 'bf16-true', '16-mixed' or '16-true'",
        BRIDGE,
    ),
    Rule(
        "overlap-precision-cpu",
        "warning",
        ("precision", "accelerator", "overlap_moe_expert_parallel_comm"),
        lambda f: _wrong_precision(f) and f.accelerator == "cpu",
        "the same configuration is refused on GPUs",
        "on a CPU overlap runs in any precision, as a rehearsal; on GPUs it is supported in bf16 and fp16",
        "set precision='bf16-mixed' before moving to GPUs",
        BRIDGE,
    ),
    Rule(
        "overlap-torch-version",
        "error",
        ("torch_version", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and older(f.torch_version, "2.6.0"),
        "training hangs in an all-to-all",
        "PyTorch before 2.6.0 hangs when two passes exchange tokens at the same time",
        "upgrade to torch >= 2.6.0",
        BRIDGE,
    ),
    Rule(
        "overlap-pipeline-needs-virtual",
        "error",
        ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size", "overlap_moe_expert_parallel_comm"),
        lambda f: (
            f.overlap_moe_expert_parallel_comm
            and f.pipeline_model_parallel_size > 1
            and f.virtual_pipeline_model_parallel_size is None
        ),
        "an assertion on virtual_pipeline_model_parallel_size",
        "under pipeline parallelism only the interleaved schedule has a forward and a backward to pair",
        "set virtual_pipeline_model_parallel_size, or pipeline_model_parallel_size=1",
        BRIDGE,
    ),
    Rule(
        "overlap-full-recompute",
        "error",
        ("recompute_granularity", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and f.recompute_granularity == "full",
        "an assertion on recompute_granularity, or a dispatch that runs again in backward and routes otherwise",
        "recomputing whole layers repeats their exchanges inside backward, where they cannot take turns",
        "checkpoint attention only: no gradient_checkpointing_enable() on the model, no recompute_granularity='full'",
        BRIDGE,
    ),
    Rule(
        "overlap-recompute-method",
        "error",
        ("recompute_method", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and f.recompute_method is not None,
        "an assertion on recompute_method",
        "a recompute method chooses whole layers, which repeats their exchanges inside backward",
        "set recompute_method=None",
        BRIDGE,
    ),
    Rule(
        "overlap-recompute-num-layers",
        "error",
        ("recompute_num_layers", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and f.recompute_num_layers is not None,
        "an assertion on recompute_num_layers",
        "a number of layers to recompute means whole layers, which repeats their exchanges inside backward",
        "set recompute_num_layers=None",
        BRIDGE,
    ),
    Rule(
        "overlap-recompute-moe",
        "error",
        ("recompute_modules", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and "moe" in f.recompute_modules,
        "a dispatch that runs again in backward",
        "recomputing the MoE block repeats its exchanges inside backward",
        "take 'moe' out of recompute_modules",
        CORE,
    ),
    Rule(
        "overlap-shared-expert-overlap",
        "error",
        ("moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and f.moe_shared_expert_overlap,
        "an assertion on moe_shared_expert_overlap",
        "the two ways to fill the exchange with compute exclude each other",
        "set moe_shared_expert_overlap=False; the shared expert runs beside the other pass's exchange anyway",
        BRIDGE,
    ),
    Rule(
        "overlap-mtp-layers",
        "error",
        ("mtp_num_layers", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and (f.mtp_num_layers or 0) > 1,
        "an assertion on mtp_num_layers",
        "overlap supports at most one multi-token-prediction layer",
        "set the model's number of next-token-prediction layers to 0 or 1",
        BRIDGE,
    ),
    Rule(
        "overlap-cuda-graph-moe",
        "error",
        ("cuda_graph_scope", "overlap_moe_expert_parallel_comm"),
        lambda f: f.overlap_moe_expert_parallel_comm and not {"moe", "mlp"}.isdisjoint(f.cuda_graph_scope),
        "a capture that fails, or an exchange frozen with the first batch's sizes",
        "a CUDA graph over the MoE block would capture the exchanges that have to take turns",
        "take 'moe' and 'mlp' out of cuda_graph_scope",
        CORE,
    ),
    Rule(
        "overlap-nothing-to-overlap",
        "warning",
        ("accumulate_grad_batches", "batch_size", "overlap_schedule"),
        _nothing_to_overlap,
        "step time as without overlap",
        "1f1b pairs two micro-batches and two_batch two halves of one, and here there is only one sequence",
        "set accumulate_grad_batches to 2 or more (4 or more to gain), or a batch size of at least 2",
        "lightning_ep, schedules",
    ),
    Rule(
        "overlap-1f1b-manual",
        "error",
        ("overlap_schedule", "automatic_optimization"),
        lambda f: (
            f.overlap_moe_expert_parallel_comm and f.overlap_schedule == "1f1b" and f.automatic_optimization is False
        ),
        "step time as without overlap",
        "1f1b pairs the micro-batches of Lightning's own accumulation, which a module that steps by hand does not use",
        "set overlap_schedule='two_batch', or automatic_optimization=True in the module",
        "lightning_ep, schedules",
    ),
    Rule(
        "overlap-one-connection",
        "warning",
        ("cuda_device_max_connections", "gpu_name", "gpu_capability"),
        lambda f: (
            f.overlap_moe_expert_parallel_comm
            and f.cuda_device_max_connections == 1
            and (found := capability(f)) is not None
            and found[0] <= 9
        ),
        "half of the gain, or none",
        "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams of a GPU up to Hopper into one queue and serializes them",
        "unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more, before the process starts",
        "measured for this project; Megatron Bridge sets it by tensor parallelism",
    ),
    Rule(
        "overlap-small-ep",
        "warning",
        ("expert_model_parallel_size", "num_nodes", "moe_token_dispatcher_type"),
        lambda f: (
            f.overlap_moe_expert_parallel_comm
            and 1 < f.expert_model_parallel_size <= 4
            and f.moe_token_dispatcher_type == "alltoall"
            and f.num_nodes in (1, 2)
        ),
        "a gain of nothing, or a slower step",
        "the exchange of a small expert-parallel group inside one or two nodes is short: the gain may be negative",
        "measure with `lightning-ep ab --vary overlap_moe_expert_parallel_comm=false,true`",
        "public measurements: EP 4 on 2 nodes was up to 13% slower",
    ),
    Rule(
        "overlap-few-microbatches",
        "warning",
        ("accumulate_grad_batches",),
        lambda f: f.overlap_moe_expert_parallel_comm and below(f.accumulate_grad_batches, 4),
        "a gain of nothing, or a slower step",
        "the first forward and the last backward of a window have no partner, and that is much of a short window",
        "set accumulate_grad_batches to 4 or more, or measure with `lightning-ep ab`",
        "lightning_ep, schedules",
    ),
)
