"""Finding the experts of a model.

An experts module holds the weights of all experts of a layer as parameters whose first axis counts the experts, and is
called as `experts(hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K]) -> [T, D]`, global ids, weights
already normalised by the router. That is what every MoE block of Hugging Face transformers calls, and what a user's own
layer may look like; block, router and shared experts stay as they are.

The decorator `use_experts_implementation` of transformers leaves the layout on the module (`has_gate`,
`is_transposed`, ...). With it the experts run as grouped GEMMs; a module without it keeps its own forward, called
with local ids.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

_LAYOUT_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")

# MoE families whose experts cannot be reached through this call, by the class of their experts or block.
UNSUPPORTED = {
    "Llama4TextExperts": "llama4 sorts tokens in front of its experts",
    "LongcatFlashExperts": "longcat_flash has identity experts",
    "DbrxExperts": "dbrx keeps the experts' weights in one matrix",
    "DbrxExpertGLU": "dbrx keeps the experts' weights in one matrix",
    "JetMoeParallelExperts": "jetmoe has experts in its attention too",
    "DogeCDMoE": "doge retrieves experts by product keys",
    "SwitchTransformersExperts": "switch_transformers keeps a module an expert",
    "NllbMoeExperts": "nllb_moe keeps a module an expert",
    "VitPoseNaiveMoe": "vitpose routes by data set",
    "Step3p7Experts": "step3p7 has its own call",
}


class ExpertsNotFoundError(ValueError):
    """The model has no experts that this package can spread over ranks."""


@dataclass(frozen=True)
class ExpertsLayout:
    """How the weights are stored; names and meaning are those of transformers' `use_experts_implementation`.

    `up`: name of the first projection's parameter, `[E, 2I, D]` (gate and up) or `[E, I, D]` without gate, transposed
    when `is_transposed`. The second is `down_proj`, `[E, D, I]`. Biases are called `<name>_bias`.
    """

    up: str
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    has_post_expert_norm: bool


@dataclass(frozen=True)
class FoundExperts:
    """One experts module: where it is, how many experts, which parameters and buffers are cut along the first axis."""

    name: str
    module: nn.Module
    num_experts: int
    sharded: tuple[str, ...]
    layout: ExpertsLayout | None

    def describe(self) -> str:
        shapes = ", ".join(f"{n} {tuple(getattr(self.module, n).shape)}" for n in self.sharded)
        how = "grouped GEMM" if self.layout else "own forward"
        return (
            f"{self.name or '(the model)'}: {type(self.module).__name__}, {self.num_experts} experts, {how}; {shapes}"
        )


def find_experts(model: nn.Module, required: bool = True) -> list[FoundExperts]:
    """All experts modules of `model`, in the order of its modules; finding none is an error unless `required=False`.

    Raises:
        ExpertsNotFoundError: none found; the message names MoE families that are known and not supported.
        ValueError: a module that looks like experts but has an unknown layout.
    """
    found, refused = [], []
    for name, module in model.named_modules():
        if type(module).__name__ in UNSUPPORTED:
            refused.append(f"{name} ({type(module).__name__}): {UNSUPPORTED[type(module).__name__]}")
        elif (experts := inspect_experts(name, module)) is not None:
            found.append(experts)
    if refused:
        raise ExpertsNotFoundError(
            "these experts are not supported yet:\n  " + "\n  ".join(refused) + "\nUse a model whose MoE block calls "
            "experts(hidden_states, top_k_index, top_k_weights), or lightning_ep.MoELayer."
        )
    if required and not found:
        raise ExpertsNotFoundError(
            f"no experts found in {type(model).__name__}: no module holds parameters with a leading axis of experts and "
            "is called as experts(hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K]). For a model without "
            "experts use strategy='ddp'; for your own MoE use lightning_ep.MoELayer or that call."
        )
    return found


def inspect_experts(name: str, module: nn.Module) -> FoundExperts | None:
    """What `module` is as experts, or None when it is something else."""
    declared = all(hasattr(module, flag) for flag in _LAYOUT_FLAGS)
    stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    if not stacked or not (declared or _has_experts_call(module)):
        _refuse_unknown(name, module, stacked)
        return None
    sizes = {p.shape[0] for p in stacked}
    if len(sizes) > 1:
        raise ValueError(
            f"experts module {name!r} ({type(module).__name__}) has 3-D parameters with different numbers of experts "
            f"{sorted(sizes)} in front; all of them must be [experts, ...]"
        )
    num_experts = getattr(module, "_ep_num_experts", None) or sizes.pop()
    local = stacked[0].shape[0]
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    # Remembered from when they were whole: afterwards another tensor may happen to be as long as the local experts.
    sharded = getattr(module, "_ep_sharded", None) or tuple(n for n, t in tensors if t.dim() and t.shape[0] == local)
    return FoundExperts(name, module, num_experts, sharded, _layout(name, module) if declared else None)


def _layout(name: str, module: nn.Module) -> ExpertsLayout:
    layout = ExpertsLayout(
        up="gate_up_proj" if module.has_gate else "up_proj", **{flag: getattr(module, flag) for flag in _LAYOUT_FLAGS}
    )
    wanted = [layout.up, "down_proj"]
    if layout.has_bias:
        wanted += [f"{layout.up}_bias", "down_proj_bias"]
    missing = [n for n in wanted if getattr(module, n, None) is None]
    if missing:
        raise ValueError(
            f"experts module {name!r} ({type(module).__name__}) declares the layout {layout} but has no {missing}; "
            "its layout is unknown here"
        )
    return layout


def _has_experts_call(module: nn.Module) -> bool:
    """Whether forward takes exactly (hidden_states, top_k_index, top_k_weights), by whatever similar names."""
    try:
        names = [p.name.lower() for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        return False
    if len(names) != 3:
        return False
    indices, weights = names[1:]
    return any(s in indices for s in ("ind", "idx", "expert")) and any(
        s in weights for s in ("weight", "score", "prob")
    )


def _refuse_unknown(name: str, module: nn.Module, stacked: list[nn.Parameter]) -> None:
    looks_like_experts = len(stacked) >= 2 and "expert" in type(module).__name__.lower()
    if looks_like_experts and len({p.shape[0] for p in stacked}) == 1:
        raise ValueError(
            f"experts module {name!r} ({type(module).__name__}) has an unknown layout: it holds "
            f"{[tuple(p.shape) for p in stacked]} but its forward{inspect.signature(module.forward)} is not "
            "forward(hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K])"
        )
