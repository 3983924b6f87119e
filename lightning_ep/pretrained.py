"""Hugging Face checkpoints straight into shards, and back.

    def configure_model(self):
        if self.model is None:
            self.model = lightning_ep.from_pretrained("path/to/Qwen3-30B-A3B")

Under this package's strategy that builds the model on the meta device; when its experts have been cut, each rank reads
the dense weights and its own experts, nothing else. Anywhere else it loads the whole model, as transformers would.

How a family stores its experts (one tensor an expert, or all of them stacked, transposed, fused) is transformers'
knowledge: its own loading code sees the experts as DTensors of which this rank wants a share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_ep.agreement import on_all_ranks
from lightning_ep.experts.interface import FoundExperts
from lightning_ep.imports import is_available
from lightning_ep.mesh import ExpertMesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PATH = "_lightning_ep_pretrained"
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_cutting: ContextVar[bool] = ContextVar("cutting", default=False)


@contextmanager
def experts_will_be_cut() -> Generator[None, None, None]:
    """Inside, `from_pretrained` leaves the weights on disk: whoever opened this loads them after cutting."""
    token = _cutting.set(True)
    try:
        yield
    finally:
        _cutting.reset(token)


def from_pretrained(path: str | Path, model_class: Any = None, **kwargs: Any) -> PreTrainedModel:
    """A Hugging Face model with the weights of a safetensors checkpoint, in evaluation mode as transformers returns it.

    In `configure_model` under `EPOverlapStrategy`, and wherever the default device is "meta", no weight is read yet: the
    strategy does that when it sets up, after cutting the experts. Elsewhere the whole model is loaded on the CPU.

    Args:
        path: a directory, or the name of a model on the Hub.
        model_class: an Auto class or a model class of transformers; `AutoModelForCausalLM` by default.
        kwargs: as for transformers' `from_pretrained`: `dtype`, `attn_implementation`, any field of the configuration.

    Raises:
        ValueError: no such checkpoint; a quantized one; weights of the model that it lacks or has in other shapes.
    """
    transformers = _transformers()
    directory = _directory(path)
    model_class = model_class or transformers.AutoModelForCausalLM
    if not (_cutting.get() or torch.get_default_device().type == "meta"):
        how = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # to name them
        try:
            model, info = model_class.from_pretrained(directory, **how, **kwargs)
        except RuntimeError as e:
            raise ValueError(f"{directory} does not fit the model; the report above names the weights: {e}") from e
        _refuse_incomplete(directory, info)
        return model
    building = {k: kwargs.pop(k) for k in ("attn_implementation", "experts_implementation") if k in kwargs}
    dtype = kwargs.pop("dtype", "auto")
    config = transformers.AutoConfig.from_pretrained(directory, **kwargs)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{directory} is quantized; experts are cut in floating point only, dequantize it first")
    dtype = (config.dtype or torch.float32) if dtype == "auto" else dtype
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = build(config, dtype=dtype, **building).eval()
    config.name_or_path = str(directory)
    if (directory / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    setattr(model, _PATH, directory)
    return model


def load_deferred(model: nn.Module, experts: list[FoundExperts], mesh: ExpertMesh, device: torch.device) -> None:
    """Load what `from_pretrained` left on disk anywhere in `model`, whose `experts` are cut already, to `device`.

    Collective: what one rank's share of the files lacks is an error on all ranks.
    """
    for module in model.modules():
        if (directory := module.__dict__.pop(_PATH, None)) is not None:
            inside = set(module.modules())
            own = [found for found in experts if found.module in inside]
            on_all_ranks(partial(_load, module, directory, own, mesh, device))


def _load(
    model: PreTrainedModel, directory: Path, experts: list[FoundExperts], mesh: ExpertMesh, device: torch.device
) -> None:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(directory),
        device_map={"": device},
        ignore_mismatched_sizes=True,  # to name them
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        weight_mapping=get_model_conversion_mapping(model),
    )
    with _one_by_one(), _experts_as_shares(experts, mesh), ExitStack() as files:
        slices = _slices(directory, files)
        info, _ = convert_and_load_state_dict_in_model(model, slices, config)
        if info.conversion_errors:
            raise ValueError(f"{directory} does not fit {type(model).__name__}: {info.conversion_errors}")
        info = model._finalize_model_loading(model, config, info)
    _refuse_incomplete(directory, info.to_dict())
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)


@contextmanager
def _experts_as_shares(experts: list[FoundExperts], mesh: ExpertMesh) -> Generator[None, None, None]:
    """Inside, local experts are DTensors: whatever loads them sees their global shapes and reads this rank's share."""

    def replace(convert: Any) -> None:
        for found in experts:
            for name in found.sharded:
                slot = found.module._parameters if name in found.module._parameters else found.module._buffers
                tensor = slot[name]
                changed = convert(tensor.detach())
                slot[name] = (
                    nn.Parameter(changed, tensor.requires_grad) if slot is found.module._parameters else changed
                )

    replace(lambda local: DTensor.from_local(local, mesh.device_mesh, [Replicate(), Shard(0)], run_check=False))
    yield
    replace(lambda share: share.to_local())


def _slices(directory: Path, files: ExitStack) -> dict[str, Any]:
    """Every tensor of the checkpoint by name, read only when it is indexed."""
    from safetensors import safe_open

    index = directory / _INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [_WEIGHTS]
    slices = {}
    for name in names:
        file = files.enter_context(safe_open(directory / name, framework="pt"))
        slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    return slices


def _refuse_incomplete(directory: Path, info: dict[str, Any]) -> None:
    """Transformers initialises what it does not find, at random; that is how a loss of 15 begins."""
    problems = [
        f"{kind}: {sorted(map(str, info[f'{kind}_keys']))}"
        for kind in ("missing", "mismatched")
        if info[f"{kind}_keys"]
    ]
    if problems:
        raise ValueError(f"the checkpoint {directory} does not have all weights of the model; {'; '.join(problems)}")


def _directory(path: str | Path) -> Path:
    directory = Path(path)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        try:
            directory = Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json"]))
        except Exception as e:
            raise ValueError(f"{path} is neither a directory nor a model that can be had from the Hub: {e}") from e
    missing = [n for n in ("config.json",) if not (directory / n).is_file()]
    if not any((directory / n).is_file() for n in (_INDEX, _WEIGHTS)):
        missing.append(f"{_WEIGHTS} or {_INDEX}")
    if missing:
        raise ValueError(
            f"{directory} is not a safetensors checkpoint of transformers: it has no {', no '.join(missing)}"
        )
    return directory


def _transformers() -> Any:
    if not is_available("transformers"):
        raise ValueError("Hugging Face checkpoints need transformers: pip install 'lightning-ep[hf]'")
    import transformers

    return transformers


@contextmanager
def _one_by_one() -> Generator[None, None, None]:
    """Transformers reads a weight when it is its turn, not all of them ahead (twice the memory), without progress bars."""
    from transformers.utils import logging

    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before, bars = os.environ.get(name), logging.is_progress_bar_enabled()
    os.environ[name] = "1"
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        if bars:
            logging.enable_progress_bar()
