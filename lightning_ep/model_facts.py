"""Facts that a model shows: its Hugging Face config, its experts, biases, and which layers it recomputes.

Works on a model on any device, the meta device included, and on a LightningModule that holds no weights yet: a Hugging
Face config among its attributes or hyperparameters already says most of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from torch import nn

from lightning_ep import imports
from lightning_ep.experts.interface import inspect_experts

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_MTP_LAYERS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_layers",
    "num_mtp_modules",
    "mtp_num_hidden_layers",
)
_SHARED_SIZE = (
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "shared_intermediate_size",
)
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_QKV_BIAS = ("add_qkv_bias", "qkv_bias", "use_qkv_bias", "attention_bias")
_QKV = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv",
    "query",
    "key",
    "value",
    "q_a_proj",
    "q_b_proj",
    "kv_a",
    "kv_b",
    "c_attn",
    "wqkv",
    "in_proj",
)


def model_facts(model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """What `model` shows of the facts, and where each was read.

    Returns:
        facts by name (only those that are known) and, for the same names, a phrase saying where they were found.
    """
    facts: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if isinstance(automatic := getattr(model, "automatic_optimization", None), bool):
        facts["automatic_optimization"] = automatic
    if (config := _config(model)) is not None:
        for name, (value, attribute) in config_facts(config).items():
            facts[name], origins[name] = value, f"{attribute} of {type(config).__name__}"
        facts["transformers_version"] = imports.version("transformers")
    experts = dict(_experts(model))
    if experts and "num_moe_experts" not in facts:
        facts["num_moe_experts"] = gcd(*experts.values())
        first = {size: name for name, size in reversed(experts.items())}
        origins["num_moe_experts"] = (
            f"{len(experts)} experts modules, the first is {next(iter(experts))}"
            if len(first) == 1
            else "common to " + ", ".join(f"{size} in {name}" for size, name in sorted(first.items()))
        )
    for name, linear in _biases(model, experts).items():
        facts[name] = linear is not None
        origins[name] = f"{linear} has a bias" if linear else "no such bias in the attention layers"
    if experts:
        facts["recomputed_layers"] = len(layers := recomputed_layers(model, experts))
    if experts and layers:
        facts["recompute_granularity"] = "full"
        origins["recompute_granularity"] = (
            f"activation checkpointing is on for {len(layers)} modules with experts inside, the first is {layers[0]}"
        )
    return facts, origins


def config_facts(config: Any) -> dict[str, tuple[Any, str]]:
    """Facts in a Hugging Face config (or any object with such attributes): name to value and attribute read."""
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    aliases = getattr(text, "attribute_map", {})
    aliases = aliases if isinstance(aliases, Mapping) else {}

    def read(names: tuple[str, ...], kind: type) -> tuple[Any, str] | None:
        pairs = ((getattr(text, name, None), aliases.get(name, name)) for name in names)
        return next(((value, name) for value, name in pairs if type(value) is kind), None)

    found = {
        "num_moe_experts": read(_NUM_EXPERTS, int),
        "mtp_num_layers": read(_MTP_LAYERS, int),
        "moe_shared_expert_intermediate_size": read(_SHARED_SIZE, int) or _shared_experts(text, read(_NUM_SHARED, int)),
        "add_qkv_bias": read(_QKV_BIAS, bool),
        "use_cache": read(("use_cache",), bool),
        "output_router_logits": read(("output_router_logits",), bool),
    }
    # A size of 0 is how configs say that there is no shared expert.
    return {
        fact: pair
        for fact, pair in found.items()
        if pair is not None and (fact != "moe_shared_expert_intermediate_size" or pair[0] > 0)
    }


def _shared_experts(text: Any, count: tuple[int, str] | None) -> tuple[int, str] | None:
    """Size of DeepSeek-like shared experts, which are counted in units of a routed expert."""
    size = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    return (count[0] * size, count[1]) if count and isinstance(size, int) else None


def num_experts(config: Any) -> int:
    """Number of routed experts of a config (object or mapping), 0 when it has none."""
    for name in _NUM_EXPERTS:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if type(value) is int:
            return value
    return 0


def recomputed_layers(model: nn.Module, experts: Mapping[str, int]) -> list[str]:
    """Names of the modules that are recomputed in backward together with the experts, so the dispatch, inside them."""
    holders = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "gradient_checkpointing", None), bool) or _is_wrapper(module)
        if any(_inside(expert, name) for expert in experts)
    }
    # A whole model carries the flag too, on as soon as some of its layers recompute: only its layers count then.
    return [
        name
        for name, module in holders.items()
        if _is_wrapper(module) or module.gradient_checkpointing
        if _is_wrapper(module) or _is_layer(module) or not any(_inside(other, name) for other in holders)
    ]


def _is_wrapper(module: nn.Module) -> bool:
    # Of torch's checkpoint_wrapper; the name spares the import of a private module.
    return type(module).__name__ == "CheckpointWrapper"


def _is_layer(module: nn.Module) -> bool:
    # Of transformers, which is optional here.
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def _inside(name: str, parent: str) -> bool:
    return name != parent and (not parent or name.startswith(parent + "."))


def _config(model: nn.Module) -> Any:
    """The Hugging Face config of `model`, the outermost with experts if there are several (a teacher, a tower)."""
    holders = [*(getattr(model, "hparams", None) or {}).values(), *vars(model).values()]
    holders += [getattr(module, "config", None) for module in model.modules()]
    configs = [holder for holder in holders if hasattr(holder, "model_type") and hasattr(holder, "to_dict")]
    return min(configs, key=lambda config: "num_moe_experts" not in config_facts(config), default=None)


def _experts(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Name and number of experts (of all ranks) of every experts module."""
    for name, module in model.named_modules():
        try:
            found = inspect_experts(name, module)
        except ValueError:
            continue  # an unknown layout, which the strategy refuses when it cuts the experts
        if found is not None:
            yield name, found.num_experts


def _biases(model: nn.Module, experts: Mapping[str, int]) -> dict[str, str | None]:
    """The first biased linear of the attention layers beside the experts: on query/key/value, and on the output."""
    stacks = {_stack(name) for name in experts}
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        parent, _, child = name.rpartition(".")
        if not isinstance(module, nn.Linear) or _stack(parent) not in stacks:
            continue
        if not type(model.get_submodule(parent)).__name__.endswith("Attention"):
            continue
        fact = "add_qkv_bias" if child.lower().startswith(_QKV) else "add_bias_linear"
        found.setdefault(fact, None)
        if module.bias is not None and found[fact] is None:
            found[fact] = name
    return found


def _stack(name: str) -> str:
    """The list of layers that a module belongs to: "model.layers" for "model.layers.3.self_attn"."""
    parts = name.split(".")
    return ".".join(parts[: next((i for i, part in enumerate(parts) if part.isdigit()), 0)])
