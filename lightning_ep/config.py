"""The user's options, under the names that Megatron Core and Megatron Bridge gave them.

`EPConfig` only refuses values that mean nothing on their own (an unknown choice, a size below one). Whether values fit
together, the model, the trainer and the machine is the table's business: `lightning_ep.constraints`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

OverlapSchedule = Literal["auto", "1f1b", "two_batch"]
ExpertsImplementation = Literal["grouped_mm", "transformer_engine"]

_CHOICES = {"overlap_schedule": get_args(OverlapSchedule), "experts_implementation": get_args(ExpertsImplementation)}
_SIZES = (
    "expert_model_parallel_size",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "moe_deepep_num_sms",
    "moe_hybridep_num_sms",
)
_OPTIONAL_SIZES = ("virtual_pipeline_model_parallel_size", "recompute_num_layers")
_LISTS = ("recompute_modules", "cuda_graph_scope")


@dataclass(frozen=True)
class EPConfig:
    """What `EPOverlapStrategy` was asked for.

    Raises:
        ValueError: listing every argument whose value is no choice or no size, with the fix.
    """

    expert_model_parallel_size: int = 1
    moe_token_dispatcher_type: str = "alltoall"
    moe_flex_dispatcher_backend: str | None = None
    overlap_moe_expert_parallel_comm: bool = False
    overlap_schedule: OverlapSchedule = "auto"
    overlap_split_module: str | None = None
    delay_wgrad_compute: bool = False
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    gradient_accumulation_fusion: bool = False
    overlap_grad_reduce: bool = False
    moe_shared_expert_overlap: bool = False
    moe_router_force_load_balancing: bool = False
    moe_permute_fusion: bool = True
    moe_dispatch_dedup: bool = True
    rms_norm_fusion: bool = False
    experts_implementation: ExpertsImplementation = "grouped_mm"
    moe_deepep_num_sms: int = 20
    moe_hybridep_num_sms: int = 16
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    tensor_model_parallel_size: int = 1
    cuda_graph_scope: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _LISTS:
            value = getattr(self, name)
            # A lone "moe" would otherwise read as the letters m, o, e; YAML gives lists and null.
            value = (value,) if isinstance(value, str) else tuple(value or ())
            object.__setattr__(self, name, value)
        if wrong := value_errors({field.name: getattr(self, field.name) for field in fields(self)}):
            raise ValueError("; ".join(f"{name}={getattr(self, name)!r} {text}" for name, text in wrong.items()))

    @property
    def delays_wgrad(self) -> bool:
        """Whether expert weight gradients wait for the dispatch gradient's exchange, under a schedule or without."""
        return self.delay_wgrad_compute or self.overlap_dispatch_backward_with_experts_wgrad


def value_errors(options: dict[str, object]) -> dict[str, str]:
    """What is wrong with every option whose value means nothing on its own, and the fix."""
    wrong = {
        name: f"is not a choice; use one of {', '.join(map(repr, choices))}"
        for name, choices in _CHOICES.items()
        if name in options and options[name] not in choices
    }
    for name in (*_SIZES, *_OPTIONAL_SIZES):
        value = options.get(name)
        unset = name not in options or (value is None and name in _OPTIONAL_SIZES)
        if not unset and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            wrong[name] = "is not a size; set it to an integer of at least 1"
    sms = options.get("moe_deepep_num_sms")
    if isinstance(sms, int) and sms > 0 and sms % 2:
        wrong["moe_deepep_num_sms"] = f"is odd, and DeepEP works in pairs of SMs; set it to {sms + 1}"
    return wrong
