"""The flex dispatcher's backends: which GPU runs which, and the field's two helpers around a config.

Names and meaning are Megatron Bridge's: `apply_flex_dispatcher_backend` writes the wish into a config where the GPU can
have it, `validate_flex_dispatcher_backend` refuses a config whose GPU cannot.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ep.model_facts import num_experts

BACKENDS = ("deepep", "hybridep")
# GPUs of one node that DeepEP's kernels connect over NVLink.
NVLINK_RANKS = 8
_GPUS = {
    "deepep": "compute capability 8.x or 9.x (Ampere, Ada, Hopper), B200 or B300",
    "hybridep": "compute capability 8.x, 9.x or 10.x (Ampere, Ada, Hopper, B200, B300, GB200 and GB300 with NVL72)",
}


def supports(backend: str, gpu_name: str | None, capability: tuple[int, int] | None) -> bool | None:
    """Whether a GPU runs `backend`; None where the GPU is not known well enough to say."""
    if backend == "deepep" and gpu_name and re.search(r"\bB[23]00\b", gpu_name):
        return True
    if capability is None:
        return None
    if capability[0] == 10 and backend == "deepep":
        # Only the name tells B200 and B300 from GB200 and GB300.
        return False if gpu_name else None
    return capability[0] in ((8, 9) if backend == "deepep" else (8, 9, 10))


def gpus_of(backend: str) -> str:
    """The GPUs that run `backend`, in words."""
    return _GPUS[backend]


def unreachable(ep_size: int, ranks_per_node: int) -> str:
    """Why DeepEP cannot connect EP groups of `ep_size` consecutive ranks, or ""."""
    if ep_size > ranks_per_node and (ep_size % NVLINK_RANKS or ranks_per_node % NVLINK_RANKS):
        return (
            f"expert_model_parallel_size={ep_size} spans nodes of {ranks_per_node} ranks, and across nodes DeepEP needs "
            f"{NVLINK_RANKS} ranks of each; keep expert_model_parallel_size within a node, or set "
            "moe_token_dispatcher_type='alltoall'"
        )
    return ""


def both_overridden(argv: Sequence[str]) -> bool:
    """Whether a command line (`--trainer.strategy.init_args.NAME=...`) overrides the dispatcher's type and backend."""
    overrides = (argument for argument in argv if argument.startswith("--trainer.strategy."))
    keys = {argument.partition("=")[0].rpartition(".")[2] for argument in overrides}
    return {"moe_token_dispatcher_type", "moe_flex_dispatcher_backend"} <= keys


def settle_dispatcher(dispatcher_type: str, backend: str | None) -> tuple[str, str | None, str]:
    """The dispatcher meant by someone who overrode both arguments at once: the backend wins.

    Returns:
        dispatcher type, backend, and the sentence to print ("" where the two agreed).
    """
    backend = None if backend is None or backend.lower() in ("none", "null", "") else backend
    settled = "flex" if backend in BACKENDS else "alltoall" if backend is None and dispatcher_type == "flex" else None
    if settled in (None, dispatcher_type):
        return dispatcher_type, backend, ""
    return (
        settled,
        backend,
        f"moe_token_dispatcher_type={dispatcher_type!r} and moe_flex_dispatcher_backend={backend!r} were both "
        f"overridden: the backend wins, moe_token_dispatcher_type is now {settled!r}",
    )


def apply_flex_dispatcher_backend(
    config: Any, moe_flex_dispatcher_backend: str | None = None, *, device_properties: Any = None
) -> None:
    """Switch `config` to the flex dispatcher with a backend, where the model and the GPU allow it.

    Sets `moe_token_dispatcher_type="flex"`, `moe_flex_dispatcher_backend` and `moe_shared_expert_overlap=False`. Warns
    (on rank 0) and changes nothing for a model without experts or an unknown backend; on a GPU that does not run the
    backend it warns and falls back to alltoall with the backend cleared. Without any GPU, on a login node, the wish is
    recorded as it stands.

    Args:
        config: any object or mapping with these keys and the number of experts (`num_moe_experts`, or a Hugging Face
            name of it); changed in place.
        moe_flex_dispatcher_backend: "deepep" or "hybridep".
        device_properties: name, major and minor of the GPU; asked of CUDA by default, whose errors propagate.
    """
    if not num_experts(config):
        rank_zero_warn(
            "DeepEP and HybridEP move the tokens of MoE models only, and this config has no experts (num_moe_experts "
            f"is not set or 0): moe_flex_dispatcher_backend={moe_flex_dispatcher_backend!r} is left aside"
        )
        return
    if moe_flex_dispatcher_backend not in BACKENDS:
        rank_zero_warn(
            f"moe_flex_dispatcher_backend={moe_flex_dispatcher_backend!r} is no backend of the flex dispatcher "
            f"(those are {', '.join(map(repr, BACKENDS))}); the config stays as it is"
        )
        return
    gpu = device_properties or _query_gpu()
    if gpu is not None and not supports(moe_flex_dispatcher_backend, gpu.name, (gpu.major, gpu.minor)):
        rank_zero_warn(
            f"{moe_flex_dispatcher_backend} needs {gpus_of(moe_flex_dispatcher_backend)}; this GPU is "
            f"{_describe(gpu)}. Falling back to moe_token_dispatcher_type='alltoall'"
        )
        _write(config, moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend=None)
        return
    _write(
        config,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=moe_flex_dispatcher_backend,
        moe_shared_expert_overlap=False,
    )


def validate_flex_dispatcher_backend(config: Any, *, device_properties: Any = None) -> None:
    """Refuse a flex config whose GPU cannot run its backend; a flex config without a backend goes back to alltoall.

    Raises:
        ValueError: on a GPU that does not run the backend, or for an unknown backend. Without a GPU nothing is refused.
    """
    if _read(config, "moe_token_dispatcher_type") != "flex":
        return
    backend = _read(config, "moe_flex_dispatcher_backend")
    if backend is None:
        _write(config, moe_token_dispatcher_type="alltoall")
        return
    if backend not in BACKENDS:
        raise ValueError(
            f"moe_flex_dispatcher_backend={backend!r} is unknown; use one of {', '.join(map(repr, BACKENDS))}"
        )
    gpu = device_properties or _query_gpu()
    if gpu is not None and not supports(backend, gpu.name, (gpu.major, gpu.minor)):
        raise ValueError(
            f"moe_flex_dispatcher_backend={backend!r} needs {gpus_of(backend)}, and this GPU is {_describe(gpu)}; "
            "set moe_token_dispatcher_type='alltoall' or take another GPU"
        )


def _query_gpu() -> Any:
    return torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None


def _describe(gpu: Any) -> str:
    return f"{gpu.name} (compute capability {gpu.major}.{gpu.minor})"


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, MutableMapping) else getattr(config, name, None)


def _write(config: Any, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(config, MutableMapping):
            config[name] = value
        else:
            setattr(config, name, value)
