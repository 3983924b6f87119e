"""Hugging Face checkpoints in one rank of the process pool."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ep import export_pretrained, from_pretrained
from lightning_ep.config import EPConfig
from lightning_ep.experts.model import ParallelModel
from lightning_ep.mesh import ExpertMesh, build_mesh
from lightning_ep.pretrained import experts_will_be_cut
from tests.checkpoint.runs import failure
from tests.reference import tokens
from tests.trained import CausalLM, loader, quiet_trainer


class Counted:
    """A safetensors file that counts the bytes read from it."""

    read: int = 0
    names: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.file = _safe_open(*args, **kwargs)

    def __enter__(self) -> Counted:
        self.file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.__exit__(*args)

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(name, self.file.get_slice(name))


class CountedSlice:
    def __init__(self, name: str, inner: Any) -> None:
        self.name, self.inner = name, inner
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        tensor = self.inner[index]
        Counted.read += tensor.nbytes
        Counted.names.add(self.name)
        return tensor


_safe_open = safetensors.safe_open


def spread(folder: Path, ep_size: int, **kwargs: Any) -> tuple[ParallelModel, ExpertMesh]:
    """What the strategy does with a model of `from_pretrained`."""
    mesh = build_mesh(ep_size, "cpu")
    dist.barrier()  # a rank that fails at once must not leave while others still connect
    with experts_will_be_cut():
        model = from_pretrained(folder, attn_implementation="eager", **kwargs)
    parallel = ParallelModel(model, EPConfig(expert_model_parallel_size=ep_size), mesh)
    parallel.shard()
    parallel.materialize(torch.device("cpu"))
    return parallel, mesh


def there_and_back(folder: Path, out: Path, ep_size: int) -> dict[str, Any]:
    """Load shards, compute, export; what it read."""
    Counted.read, Counted.names = 0, set()
    with mock.patch.object(safetensors, "safe_open", Counted):
        parallel, _ = spread(folder, ep_size)
    model = parallel.model
    with torch.no_grad():
        logits = model(input_ids=tokens(0, 0, 0)).logits
    experts = parallel.expert_tensors()
    held = sum(p.nbytes for p in {*model.parameters()})
    held_experts = sum(p.nbytes for p in experts if isinstance(p, nn.Parameter))
    export_pretrained(model, out, 20_000)
    return {
        "logits": logits, "read": Counted.read, "names": Counted.names, "held": held, "experts": held_experts,
        "training": model.training, "meta": [n for n, t in model.named_buffers() if t.is_meta],
    }  # fmt: skip


def cut_model(folder: Path, ep_size: int, **kwargs: Any) -> dict[str, Any]:
    """A rank's own parameters, and what was frozen before loading stays frozen."""
    mesh = build_mesh(ep_size, "cpu")
    dist.barrier()  # a rank that fails below and leaves would meet another one still connecting
    with experts_will_be_cut():
        model = from_pretrained(folder, **kwargs)
    model.get_input_embeddings().requires_grad_(False)
    parallel = ParallelModel(model, EPConfig(expert_model_parallel_size=ep_size), mesh)
    parallel.shard()
    parallel.materialize(torch.device("cpu"))
    return {
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "frozen": [n for n, p in model.named_parameters() if not p.requires_grad],
        "dtypes": {p.dtype for p in model.parameters()},
        "types": {type(p) for p in model.parameters()},
    }


class FineTune(CausalLM):
    """As in the README: the same module under any strategy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(nn.Identity())
        self.folder, self.model = folder, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = from_pretrained(self.folder, attn_implementation="eager")


def fine_tune(folder: Path, out: Path, ep_size: int) -> list[float]:
    from lightning_ep import EPOverlapStrategy

    module = FineTune(folder)
    trainer = quiet_trainer(
        strategy=EPOverlapStrategy(expert_model_parallel_size=ep_size), use_distributed_sampler=False
    )
    trainer.fit(module, loader(3, 1))
    export_pretrained(module, out)
    return [loss.item() for loss in module.losses]


def export_fails(folder: Path, out: Path, largest_file: int | None) -> str:
    """What is said when rank 0 cannot write; `largest_file` in bytes acts as a full disk."""
    parallel, _ = spread(folder, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest_file is not None and dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
    try:
        return failure(export_pretrained, parallel.model, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
