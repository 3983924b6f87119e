"""Every experts class of transformers' interface, found by its decorator, and a tiny instance of each."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

HIDDEN, INNER, NUM_EXPERTS = 16, 24, 8

# What experts classes read from a configuration, whatever it is called in theirs.
_SIZES = {
    "hidden_size": HIDDEN, "moe_hidden_size": HIDDEN, "moe_latent_size": HIDDEN, "intermediate_size": INNER,
    "moe_intermediate_size": INNER, "num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS, "moe_num_experts": NUM_EXPERTS,
}  # fmt: skip
_DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)


def experts_classes() -> list[tuple[str, str]]:
    """(model type, class name) of every class that carries the decorator; reads sources, imports no model."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    sources = sorted(Path(spec.origin).parent.glob("models/*/modeling_*.py"))
    return [(path.parent.name, name) for path in sources for name in _DECORATED.findall(path.read_text())]


class TinyConfig:
    """A configuration of the model's own class, its sizes replaced; validation and per-layer rules stay outside."""

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __deepcopy__(self, memo: dict) -> TinyConfig:
        return self

    def __getattr__(self, name: str) -> Any:
        return _SIZES[name] if name in _SIZES else getattr(self._config, name)


def tiny_experts(model_type: str, class_name: str) -> nn.Module:
    """The class built from its model's own configuration at tiny sizes, weights random, computing eagerly."""
    package = f"transformers.models.{model_type}"
    experts_class = getattr(importlib.import_module(f"{package}.modeling_{model_type}"), class_name)
    configurations = importlib.import_module(f"{package}.configuration_{model_type}")
    for config_class in vars(configurations).values():
        if not inspect.isclass(config_class) or config_class.__module__ != configurations.__name__:
            continue
        try:
            module = experts_class(TinyConfig(config_class()))
        except AttributeError:
            continue  # the configuration of another part of the model
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.5)
        return module
    raise AssertionError(f"no configuration of {model_type} builds {class_name}")
