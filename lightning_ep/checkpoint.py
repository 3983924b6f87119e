"""Checkpoints of a model whose experts are spread over ranks: each rank writes and reads its own experts.

Only while saving and loading, experts and their optimizer moments are DTensors `[Replicate, Shard(0)]` on the
("edp", "ep") mesh, so a checkpoint is the same whatever the EP and world size, and loads at any other, or into one
process without any strategy. Optimizer states are keyed by parameter names. Everything that is not a tensor of a model
or an optimizer is saved by rank 0, as far as it can be loaded again without executing code.

Host memory while loading, beside the model: this rank's share of model and optimizer, once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_ep import storage
from lightning_ep.agreement import on_all_ranks
from lightning_ep.plain_values import plain
from lightning_ep.shares import ExpertShares
from lightning_ep.storage import Key

if TYPE_CHECKING:
    from lightning_ep.strategy import EPOverlapStrategy

_LOST = "lightning_ep_not_saved"


# -- for everybody


def load_full_state_dict(path: str | os.PathLike) -> dict[str, Tensor]:
    """The model's weights of a checkpoint, experts whole, on the CPU, in one process without strategy or process group.

    Args:
        path: a sharded checkpoint directory, or a single file.

    Returns names as in the LightningModule's `state_dict()`. Raises ValueError naming the file that is damaged.
    """
    path = storage.local(path)
    if path.is_dir():
        metadata = storage.read_metadata(path)
        return _state_dict(storage.read_tensors(path, metadata, lambda key: key[0] == "state_dict", _empty), path)
    return _state_dict(storage.load_file(path), path)


def consolidate_checkpoint(directory: str | os.PathLike, file: str | os.PathLike) -> None:
    """Turn a sharded checkpoint into one file, as Lightning's single-device strategy would have written it.

    `Trainer(strategy="auto").fit(ckpt_path=file)`, `LightningModule.load_from_checkpoint(file)` and this package's
    strategy load it. Runs in one process and holds model and optimizer whole in host memory. `file` appears at once.
    """
    directory = storage.local(directory)
    metadata = storage.read_metadata(directory)
    checkpoint = storage.read_meta(directory, metadata)
    _merge(checkpoint, _with_optimizers(storage.read_tensors(directory, metadata, lambda key: True, _empty)))
    checkpoint.pop(_LOST, None)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [_numbered(state) for state in checkpoint["optimizer_states"]]
    storage.write_file(checkpoint, storage.local(file))


def _empty(key: Key, size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype)


# -- for the strategy


def save(
    strategy: EPOverlapStrategy, checkpoint: dict[str, Any], filepath: str | os.PathLike, storage_options: Any = None
) -> None:
    """Write Lightning's checkpoint of this rank as its part of the sharded one at `filepath`. Collective.

    Raises RuntimeError on every rank when any failed; a checkpoint that was at `filepath` before is then unchanged.
    """
    if storage_options is not None:
        raise TypeError("EPOverlapStrategy writes sharded checkpoints and takes no storage_options")
    target, token = strategy.broadcast((os.fspath(filepath), storage.new_token()))
    directory = storage.local(target)
    shares = ExpertShares(strategy)
    rest = dict(checkpoint)
    optimizers = rest.pop("optimizer_states", None)
    tensors = shares.take_models(rest)
    if optimizers is not None:
        rest["optimizer_states"] = []
        for i, state in enumerate(optimizers):
            tensors[f"optimizer_{i}"], kept = shares.take_optimizer(state)
            rest["optimizer_states"].append(kept)
    meta = rest
    if nameless := list(shares.look_like_experts(rest)):
        rank_zero_warn(
            f"{', '.join(nameless)} have the shape of this rank's experts, but not a parameter's name: only rank 0's are "
            "saved. Save them in a dict by the names of the parameters."
        )
    if strategy.is_global_zero:
        meta, lost = plain(rest)
        meta[_LOST] = lost
        if lost:
            rank_zero_warn(f"not saved in {target}, since loading them would execute code: {', '.join(lost)}")
    storage.write(Path(os.path.abspath(directory)), tensors, meta, token)


def load(strategy: EPOverlapStrategy, path: str | os.PathLike, fitting: bool) -> dict[str, Any]:
    """Lightning's checkpoint with this rank's experts, from a sharded one or a single file. Collective.

    Args:
        path: whatever EP and world size it was written with, with this package's strategy or a plain one.
        fitting: whether to read optimizer states.

    Raises ValueError or FileNotFoundError, on every rank, naming the file.
    """
    path = storage.local(strategy.broadcast(os.fspath(path)))
    shares, optimizers = ExpertShares(strategy), strategy.optimizers if fitting else None
    checkpoint = on_all_ranks(lambda: _read(path, shares, optimizers))
    if lost := checkpoint.pop(_LOST, None):
        rank_zero_warn(f"{path} was saved without {', '.join(lost)}")
    return checkpoint


def _read(path: Path, shares: ExpertShares, optimizers: list[Optimizer] | None) -> dict[str, Any]:
    if path.is_dir():
        metadata = storage.read_metadata(path)
        checkpoint = storage.read_meta(path, metadata)

        def empty(key: Key, size: torch.Size, dtype: torch.dtype) -> Tensor:
            return (shares.empty_state if _is_optimizer(key[0]) else shares.empty_model)(key, size, dtype)

        everything = optimizers is not None
        tensors = storage.read_tensors(path, metadata, lambda key: everything or not _is_optimizer(key[0]), empty)
        _merge(checkpoint, _with_optimizers(_local(tensors)))
    else:
        checkpoint = storage.load_file(path, mmap=True)
        states = checkpoint.pop("optimizer_states", None)
        checkpoint = shares.cut(checkpoint)
        if states is not None and optimizers is not None:
            same = len(states) == len(optimizers)  # else it is refused when it is loaded
            pairs = zip(states, optimizers, strict=True) if same else ()
            checkpoint["optimizer_states"] = [shares.cut_optimizer(*pair) for pair in pairs]
    _state_dict(checkpoint, path)
    if optimizers is None:
        checkpoint.pop("optimizer_states", None)
    return checkpoint


def _state_dict(checkpoint: dict[str, Any], path: Path) -> dict[str, Tensor]:
    if not isinstance(checkpoint.get("state_dict"), dict):
        raise ValueError(f"{path} is not a checkpoint of Lightning: it has no state_dict")
    return checkpoint["state_dict"]


def remove(strategy: EPOverlapStrategy, path: str | os.PathLike) -> None:
    """Remove a checkpoint, directory or file."""
    if strategy.is_global_zero:
        storage.remove(Path(path))


def optimizer_state(strategy: EPOverlapStrategy, optimizer: Optimizer | LightningOptimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with parameters' names in place of their numbers."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer._optimizer
    state = optimizer.state_dict()
    names = list(_names(strategy.lightning_module, optimizer))
    return {
        **state,
        "state": {names[k] if isinstance(k, int) else k: v for k, v in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }


def optimizer_states_to_load(strategy: EPOverlapStrategy, checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each optimizer's `load_state_dict` takes: parameters by number, in this optimizer's order.

    Raises ValueError when the checkpoint's optimizers have other parameters, naming them.
    """
    saved = checkpoint["optimizer_states"]
    if len(saved) != len(strategy.optimizers):
        raise ValueError(f"the checkpoint has {len(saved)} optimizers, the module has {len(strategy.optimizers)}")
    return [
        _numbered(state, list(_grouped_names(strategy.lightning_module, optimizer)), f"optimizer {i}")
        for i, (optimizer, state) in enumerate(zip(strategy.optimizers, saved, strict=True))
    ]


def _is_optimizer(key: str | int) -> bool:
    return str(key).startswith("optimizer_")


def _with_optimizers(tensors: dict[str, Any]) -> dict[str, Any]:
    """`optimizer_0`, `optimizer_1` (the names on disk, Lightning's) as the list that Lightning's checkpoint has."""
    numbers = sorted(int(key.removeprefix("optimizer_")) for key in tensors if _is_optimizer(key))
    states = {i: tensors.pop(f"optimizer_{i}") for i in numbers}
    return {**tensors, "optimizer_states": states} if states else tensors


def _merge(values: Any, tensors: dict) -> None:
    """Put nested tensors back where they were taken from."""
    for key, value in tensors.items():
        if isinstance(value, dict):
            if isinstance(values, dict):
                values.setdefault(key, {})
            _merge(values[key], value)
        else:
            values[key] = value


def _local(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _local(v) for k, v in value.items()}
    return value.to_local() if isinstance(value, DTensor) else value


# -- parameters of optimizers by name


def _grouped_names(module: nn.Module, optimizer: Optimizer) -> Iterator[list[str]]:
    """Names of each group's parameters; one that the module does not hold is called after its place."""
    names = {p: name for name, p in module.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        yield [names.get(p, f"group {g}, parameter {i}") for i, p in enumerate(group["params"])]


def _names(module: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    for group in _grouped_names(module, optimizer):
        yield from group


def _numbered(state: dict[str, Any], names: list[list[str]] | None = None, what: str = "optimizer") -> dict[str, Any]:
    """A state keyed by names as `load_state_dict` takes it: numbered in the order of `names`, or of its own groups.

    A state that has numbers already is returned as it is.
    """
    saved = [list(group["params"]) for group in state["param_groups"]]
    if not any(isinstance(name, str) for group in saved for name in group):
        return state
    names = saved if names is None else names
    if [sorted(group) for group in saved] != [sorted(group) for group in names]:
        have, want = ({n for group in groups for n in group} for groups in (saved, names))
        raise ValueError(
            f"{what} has other parameters than the checkpoint's: missing in the checkpoint {sorted(want - have)}, "
            f"unexpected {sorted(have - want)}, groups of {[len(g) for g in saved]} parameters there and "
            f"{[len(g) for g in names]} here"
        )
    numbers = {name: i for i, name in enumerate(name for group in names for name in group)}
    groups = [
        {**group, "params": [numbers[n] for n in here]}
        for group, here in zip(state["param_groups"], names, strict=True)
    ]
    return {
        **state,
        "state": {numbers.get(name, name): entries for name, entries in state["state"].items()},
        "param_groups": groups,
    }
