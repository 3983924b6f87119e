"""What the rules of `constraints.py` look at: one flat, frozen record of options, model, trainer, versions, hardware.

Options are always known (an `EPConfig` has a value for each). Everything else may be unknown, which is None, and a rule
over an unknown fact is not violated: a laptop that checks a cluster's config does not guess the cluster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import nn

from lightning_ep import imports
from lightning_ep.checkpoint_facts import checkpoint_facts
from lightning_ep.config import EPConfig, value_errors
from lightning_ep.model_facts import model_facts

# A library's version when it is known not to be installed, as opposed to None: nobody looked.
ABSENT = "not installed"


@dataclass(frozen=True)
class Facts:
    """Everything a rule may read. `origins` says, for a fact that was not typed as an argument, where it was read."""

    # Options: the strategy's arguments (see EPConfig).
    expert_model_parallel_size: int = 1
    moe_token_dispatcher_type: str = "alltoall"
    moe_flex_dispatcher_backend: str | None = None
    overlap_moe_expert_parallel_comm: bool = False
    overlap_schedule: str = "auto"
    delay_wgrad_compute: bool = False
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    gradient_accumulation_fusion: bool = False
    overlap_grad_reduce: bool = False
    moe_shared_expert_overlap: bool = False
    experts_implementation: str = "grouped_mm"
    recompute_granularity: str | None = None  # also "full" when the model checkpoints whole layers with experts
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    tensor_model_parallel_size: int = 1
    cuda_graph_scope: tuple[str, ...] = ()

    # Model.
    num_moe_experts: int | None = None  # greatest common divisor where layers differ
    moe_shared_expert_intermediate_size: int | None = None  # None also when there is no shared expert
    recomputed_layers: int | None = None  # modules that the model recomputes with experts, so the dispatch, inside
    mtp_num_layers: int | None = None
    automatic_optimization: bool | None = None  # of the LightningModule
    add_bias_linear: bool | None = None  # bias on attention's output projection
    add_qkv_bias: bool | None = None
    use_cache: bool | None = None
    output_router_logits: bool | None = None

    # Trainer.
    precision: str | None = None  # Lightning's names: "bf16-mixed", "32-true", ...
    accumulate_grad_batches: int | None = None
    batch_size: int | None = None  # sequences a rank and micro-batch
    tokens_per_rank: int | None = None  # tokens a rank and micro-batch
    world_size: int | None = None
    num_nodes: int | None = None
    accelerator: str | None = None  # "cpu" or "cuda"
    checkpoint_dir: str | None = None  # None also when nothing is saved
    checkpoint_io: str | None = None  # class of a CheckpointIO that is not Lightning's default

    # Versions; ABSENT when known not to be installed.
    torch_version: str | None = None
    transformers_version: str | None = None  # of a Hugging Face model alone
    te_version: str | None = None
    deep_ep_version: str | None = None
    hybrid_ep_version: str | None = None

    # Hardware; None without a GPU.
    gpu_name: str | None = None
    gpu_capability: tuple[int, int] | None = None
    cuda_device_max_connections: int | None = None

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)


FACT_NAMES = tuple(f.name for f in fields(Facts) if f.name != "origins")
_OPTIONS = tuple(f.name for f in fields(EPConfig) if f.name in FACT_NAMES)


def gather_facts(config: EPConfig, trainer: Any = None, model: nn.Module | None = None) -> Facts:
    """Facts of a run on this machine, before or after the model's weights exist.

    Call it as soon as the trainer is known (`model` may be a LightningModule whose `configure_model` did not run yet:
    what the model does not show stays unknown) and again when the model is complete, before its experts are cut.
    """
    known = {name: getattr(config, name) for name in _OPTIONS} | version_facts(absent=ABSENT)
    origins: dict[str, str] = {}
    device = None
    if trainer is not None:
        known |= trainer_facts(trainer, model)
        saved, origins = checkpoint_facts(trainer)
        known |= saved
        device = trainer.strategy.root_device.index
    known |= hardware_facts(known.get("accelerator"), device)
    if model is not None:
        seen, found_in = model_facts(model)
        known |= seen
        origins |= found_in
    return Facts(**known, origins=origins)


def trainer_facts(trainer: Any, model: nn.Module | None = None) -> dict[str, Any]:
    """Precision, accumulation, sizes and accelerator of a `lightning.pytorch.Trainer`, process group or not."""
    from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

    accelerator = trainer.accelerator
    cpu, cuda = isinstance(accelerator, CPUAccelerator), isinstance(accelerator, CUDAAccelerator)
    return {
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        # trainer.world_size is 1 until the process group exists.
        "world_size": trainer.num_nodes * trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "accelerator": "cpu" if cpu else "cuda" if cuda else None,
    } | batch_facts(_attributes(getattr(trainer, "datamodule", None)), _attributes(model))


_BATCH = ("micro_batch_size", "batch_size", "per_device_batch_size", "train_batch_size")
_SEQUENCE = ("seq_length", "sequence_length", "seq_len", "sequence_len", "block_size", "max_seq_length", "max_length")


def batch_facts(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sequences and tokens a micro-batch, where a data module or model says them under a usual name."""

    def first(names: tuple[str, ...]) -> int | None:
        found = (s[name] for s in settings for name in names if name in s)
        return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)

    batch, sequence = first(_BATCH), first(_SEQUENCE)
    return {"batch_size": batch, "tokens_per_rank": batch * sequence if batch and sequence else None}


def _attributes(holder: Any) -> dict[str, Any]:
    if holder is None:
        return {}
    return dict(getattr(holder, "hparams", None) or {}) | vars(holder)


def version_facts(absent: str | None = None) -> dict[str, str | None]:
    """Versions of torch and of the optional libraries; `absent` stands for one that is not installed here."""
    return {
        "torch_version": str(torch.__version__),
        "te_version": _version("transformer_engine", absent),
        "deep_ep_version": _version("deep_ep", absent),
        "hybrid_ep_version": _version("hybrid_ep_cpp", absent),
    }


def _version(module: str, absent: str | None) -> str | None:
    if not imports.is_available(module):
        return absent
    # None for a copy on PYTHONPATH, or under a distribution name of its own: there, but of unknown version.
    return imports.version(module)


def hardware_facts(accelerator: str | None = None, device: int | None = None) -> dict[str, Any]:
    """Name and compute capability of the GPU that this process uses, and the launch queue setting.

    Args:
        accelerator: "cpu" leaves the GPU out of it.
        device: CUDA device index; the current device by default.
    """
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    found: dict[str, Any] = {"cuda_device_max_connections": int(connections) if connections.isdigit() else None}
    if accelerator != "cpu" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
        found |= {"gpu_name": gpu.name, "gpu_capability": (gpu.major, gpu.minor)}
    return found


# Enough to judge a GPU that was only named (`lightning-ep validate --fact gpu_name="NVIDIA V100"`).
_CAPABILITIES = (
    (r"\bV100", (7, 0)),
    (r"\b(T4|RTX 20\d\d|TITAN RTX)\b", (7, 5)),
    (r"\b(A100|A800|A30)\b", (8, 0)),
    (r"\b(A10G?|A40|A6000|RTX 30\d\d)\b", (8, 6)),
    (r"\b(L4|L40S?|RTX 40\d\d)\b", (8, 9)),
    (r"\bG?H(20|100|200|800)\b", (9, 0)),
    (r"\bG?B[12]00\b", (10, 0)),
    (r"\bG?B300\b", (10, 3)),
    (r"\bRTX (50\d\d|PRO \d000 Blackwell)\b", (12, 0)),
)


def capability(facts: Facts) -> tuple[int, int] | None:
    """The GPU's compute capability, by its name where only that is known."""
    if facts.gpu_capability or not facts.gpu_name:
        return facts.gpu_capability
    return next((found for pattern, found in _CAPABILITIES if re.search(pattern, facts.gpu_name, re.I)), None)


def state_facts(facts: Facts, stated: Mapping[str, str]) -> Facts:
    """`facts` with those overridden that a person stated as text.

    Raises:
        ValueError: for a name that is no fact, or a text that is no value of it; names the fact and the form expected.
    """
    values = {name: parse_fact(name, text) for name, text in stated.items()}
    if wrong := value_errors(values):
        raise ValueError("; ".join(f"{name}={stated[name]!r} {text}" for name, text in wrong.items()))
    origins = {name: where for name, where in facts.origins.items() if name not in values}
    return replace(facts, **values, origins=origins | {name: f"--fact {name}" for name in values})


# A version is a type of its own here: "2.x" is a mistake worth telling.
_TYPES = {f.name: "version | None" if f.name.endswith("_version") else str(f.type) for f in fields(Facts)}


def parse_fact(name: str, text: str) -> Any:
    """The value that `text` states for the fact `name`: lists comma-separated, a capability as 9.0, None as none."""
    if name not in FACT_NAMES:
        raise ValueError(f"unknown fact {name!r}; the facts are {', '.join(FACT_NAMES)}")
    kind, text = _TYPES[name], text.strip()
    if kind.startswith("tuple[str"):
        empty = text.lower() in ("", "none", "null", "[]")
        return (
            () if empty else tuple(part.strip().strip("'\"") for part in text.strip("[]()").split(",") if part.strip())
        )
    if text.lower() in ("none", "null", ""):
        if "None" not in kind:
            raise ValueError(f"{name}={text!r}: this fact has no empty value; expected {kind}")
        return None
    try:
        return _PARSERS[kind.removesuffix(" | None")](text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no value of this fact; expected {kind}") from None


def _count(text: str) -> int:
    # int() alone takes "-2", "1_0" and digits of other scripts.
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ValueError(text)
    return int(text)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError(text)
    return text.lower() in ("true", "1", "yes")


def _capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:sm_?)?\(?(\d+?)[., ]*(\d)a?\)?", text)
    if not match:
        raise ValueError(text)
    return int(match[1]), int(match[2])


def _version_text(text: str) -> str:
    if text == ABSENT:
        return text
    try:
        return str(Version(text))
    except InvalidVersion:
        raise ValueError(text) from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": _count,
    "str": str,
    "bool": _boolean,
    "tuple[int, int]": _capability,
    "version": _version_text,
}
