"""What the field has and this project has not: refused by name, never ignored."""

from __future__ import annotations

from lightning_ep.rule import DISPATCHERS, Rule

NOT_YET = (
    Rule(
        "no-other-dispatchers",
        "error",
        ("moe_token_dispatcher_type",),
        lambda f: not f.overlap_moe_expert_parallel_comm and f.moe_token_dispatcher_type not in DISPATCHERS,
        "an option that would have to be ignored",
        "lightning_ep has the dispatchers alltoall and flex; Megatron's allgather does not exist here",
        "set moe_token_dispatcher_type='alltoall' or 'flex'",
        "lightning_ep",
    ),
    Rule(
        "no-shared-expert-overlap",
        "error",
        ("moe_shared_expert_overlap",),
        lambda f: f.moe_shared_expert_overlap and not f.overlap_moe_expert_parallel_comm,
        "an option that would have to be ignored",
        "lightning_ep does not run shared experts on a stream of their own yet",
        "set moe_shared_expert_overlap=False; overlap_moe_expert_parallel_comm=True hides the exchange otherwise",
        "lightning_ep",
    ),
    Rule(
        "recompute-is-the-models",
        "warning",
        ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"),
        lambda f: (
            not f.recomputed_layers
            and bool(f.recompute_granularity or f.recompute_modules or f.recompute_method or f.recompute_num_layers)
        ),
        "memory as without recomputation",
        "lightning_ep checks these options and does not act on them: recomputation belongs to the model",
        "switch it on in the model (torch.utils.checkpoint around attention)",
        "lightning_ep",
    ),
    Rule(
        "no-pipeline-parallelism",
        "error",
        ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        lambda f: f.pipeline_model_parallel_size > 1 or f.virtual_pipeline_model_parallel_size is not None,
        "an option that would have to be ignored",
        "lightning_ep has no pipeline parallelism yet",
        "set pipeline_model_parallel_size=1 and virtual_pipeline_model_parallel_size=None",
        "lightning_ep",
    ),
    Rule(
        "no-tensor-parallelism",
        "error",
        ("tensor_model_parallel_size",),
        lambda f: f.tensor_model_parallel_size > 1,
        "an option that would have to be ignored",
        "lightning_ep has no tensor parallelism yet",
        "set tensor_model_parallel_size=1",
        "lightning_ep",
    ),
)
