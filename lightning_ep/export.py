"""A trained model as a Hugging Face checkpoint."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ep.agreement import on_all_ranks
from lightning_ep.experts.interface import find_experts
from lightning_ep.mesh import ExpertMesh
from lightning_ep.storage import unfinished

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 5 * 10**9


def export_pretrained(model: nn.Module, directory: str | Path, max_shard_bytes: int = SHARD_BYTES) -> None:
    """Write a directory that transformers' `from_pretrained` loads, in the family's own format on disk.

    Collective: call it on every rank, inside or after training, or in a single process. Rank 0 writes. It receives one
    expert tensor of one layer at a time, from one rank at a time, so its host memory holds one shard file and that
    tensor, whatever the size of the model.

    Args:
        model: a LightningModule or any module with one transformers model inside.
        directory: must not exist, or be empty; it appears when it is complete.
        max_shard_bytes: size of one safetensors file.

    Raises on every rank: ValueError when there is no transformers model inside or the directory is not empty, OSError
    (on rank 0, ValueError elsewhere) when the disk is full.
    """
    inner = _transformers_model(model)
    target = Path(os.path.abspath(directory))
    writer = on_all_ranks(lambda: _Writer(target, max_shard_bytes) if _rank() == 0 else None)
    state, spread = inner.state_dict(), _spread(inner)
    failure: Exception | None = None
    for names in _groups(inner, state):
        tensors = {name: _whole(state[name], spread.get(name)) for name in names}
        if writer is not None and failure is None:
            try:
                writer.add(_as_on_disk(inner, tensors))
            except Exception as e:  # said at the end: the other ranks are sending
                failure = e

    def finish() -> None:
        if failure is not None:
            raise failure
        if writer is not None:
            writer.finish(inner)

    try:
        on_all_ranks(finish)
    finally:
        if writer is not None:
            shutil.rmtree(writer.folder, ignore_errors=True)


def _transformers_model(model: nn.Module) -> PreTrainedModel:
    from transformers import PreTrainedModel

    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        raise ValueError(f"{type(model).__name__} holds no model of transformers; save its state_dict() instead")
    return inner


def _spread(model: PreTrainedModel) -> dict[str, ExpertMesh]:
    """The expert tensors of which ranks hold shares, by name."""
    return {
        f"{found.name}.{name}": found.module._expert_parallel.mesh
        for found in find_experts(model, required=False)
        if hasattr(found.module, "_expert_parallel") and found.module._expert_parallel.mesh.ep_size > 1
        for name in found.sharded
    }


def _groups(model: PreTrainedModel, state: dict[str, Tensor]) -> Iterable[list[str]]:
    """Names of tensors that belong together on disk: transformers may keep two of ours as one there, or the reverse."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_converters

    used = getattr(model, "_weight_conversions", None)
    mapping = get_model_conversion_mapping(model, add_legacy=False) if used is None else used
    converters = [m for m in (t.reverse_transform() for t in reversed(mapping)) if isinstance(m, WeightConverter)]
    left_out = {*getattr(model, "all_tied_weights_keys", ()), *(model._keys_to_ignore_on_save or ())}
    groups: dict[str, list[str]] = {}
    for name in state:
        if name not in left_out:
            groups.setdefault(apply_converters(name, converters)[0], []).append(name)
    return groups.values()


def _whole(local: Tensor, mesh: ExpertMesh | None) -> Tensor:
    """A tensor on the CPU of rank 0, experts whole. On other ranks only what they contribute happens."""
    if mesh is None or mesh.edp_rank > 0:
        return local.cpu() if _rank() == 0 else local
    first = dist.get_global_rank(mesh.ep_group, 0)
    if mesh.ep_rank > 0:
        dist.send(local.contiguous(), first, group=mesh.ep_group)
        return local
    whole = torch.empty((local.shape[0] * mesh.ep_size, *local.shape[1:]), dtype=local.dtype)
    shares = whole.chunk(mesh.ep_size)
    shares[0].copy_(local)
    buffer = torch.empty_like(local, memory_format=torch.contiguous_format)
    for rank in range(1, mesh.ep_size):
        dist.recv(buffer, dist.get_global_rank(mesh.ep_group, rank), group=mesh.ep_group)
        shares[rank].copy_(buffer)
    return whole


def _as_on_disk(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class _Writer:
    """Tensors into safetensors files of bounded size, then an index and the configuration."""

    def __init__(self, target: Path, max_bytes: int) -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target} is not empty; export to a new directory")
        self.target, self.folder, self.max_bytes = target, unfinished(target), max_bytes
        self.folder.mkdir(parents=True)
        self.waiting: dict[str, Tensor] = {}
        self.files: list[list[str]] = []
        self.total = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if self.waiting and sum(t.nbytes for t in self.waiting.values()) + tensor.nbytes > self.max_bytes:
                self._flush()
            self.waiting[name] = tensor
            self.total += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        tensors = {name: t.contiguous() for name, t in self.waiting.items()}
        save_file(tensors, self.folder / f"{len(self.files)}", metadata={"format": "pt"})
        self.files.append(list(self.waiting))
        self.waiting = {}

    def finish(self, model: PreTrainedModel) -> None:
        if self.waiting:
            self._flush()
        count = len(self.files)
        names = [
            f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors" for i in range(count)
        ]
        for i, name in enumerate(names):
            os.rename(self.folder / f"{i}", self.folder / name)
        if count > 1:
            weight_map = {key: name for name, keys in zip(names, self.files, strict=True) for key in keys}
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
        config = copy.deepcopy(model.config)
        config.dtype, config.architectures = model.dtype, [type(model).__name__]
        config.save_pretrained(self.folder)
        if model.can_generate():
            model.generation_config.save_pretrained(self.folder)
        os.rename(self.folder, self.target)
