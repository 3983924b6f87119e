"""Which tensors of a checkpoint belong to experts, and this rank's share of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from lightning_ep.storage import Key

if TYPE_CHECKING:
    from lightning_ep.strategy import EPOverlapStrategy


class ExpertShares:
    """Wraps this rank's experts as parts of whole tensors, and cuts whole tensors to this rank's experts.

    Tensors are recognised by name, in the module's own state and in whatever a callback saves by the same names; states
    of an optimizer by the parameter that they belong to.
    """

    def __init__(self, strategy: EPOverlapStrategy) -> None:
        assert strategy.parallel is not None and strategy.mesh is not None
        self.mesh, self.is_first = strategy.mesh, strategy.is_global_zero
        self.totals = {getattr(f.module, n): f.num_experts for f in strategy.parallel.experts for n in f.sharded}
        module = strategy.lightning_module
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self.experts = {name: tensor for name, tensor in tensors if tensor in self.totals}
        self.parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self._meshes: dict[str, DeviceMesh] = {self.mesh.device_mesh.device_type: self.mesh.device_mesh}

    def expert(self, name: Any) -> Tensor | None:
        """The expert tensor that a name means, in this module or inside a wrapper, which puts a prefix in front."""
        if name in self.experts:
            return self.experts[name]
        found = [n for n in self.experts if isinstance(name, str) and name.endswith(f".{n}")]
        return self.experts[max(found, key=len)] if found else None

    # -- saving

    def take_models(self, values: dict[str, Any]) -> dict[str, Any]:
        """Move the tensors of model states anywhere in `values` out into the result, in dicts nested as there.

        A dict that holds experts by name is one: the module's own, and those of callbacks such as weight averaging.
        """
        taken: dict[str, Any] = {}
        for key, value in values.items():
            if not isinstance(value, Mapping):
                continue
            if any(self.expert(k) is not None for k in value):
                wrapped = {k: self._wrapped(k, v) for k, v in value.items() if isinstance(v, Tensor)}
                taken[key] = {k: v for k, v in wrapped.items() if v is not None}
                values[key] = {k: v for k, v in value.items() if not isinstance(v, Tensor)}
                continue
            inner = dict(value)
            if deeper := self.take_models(inner):
                taken[key], values[key] = deeper, inner
        return taken

    def _wrapped(self, name: str, tensor: Tensor) -> Tensor | None:
        expert = self.expert(name)
        if expert is not None and tensor.dim() and tensor.shape[0] == expert.shape[0]:
            return self._dtensor(tensor)
        # Buffers may differ between ranks; Lightning saves rank 0's.
        return tensor.detach() if self.is_first or name in self.parameters else None

    def look_like_experts(self, value: Any, path: str = "") -> Iterator[str]:
        """Paths of tensors that look like this rank's experts but were not recognised, having no name."""
        if isinstance(value, Mapping):
            for k, v in value.items():
                yield from self.look_like_experts(v, f"{path}.{k}" if path else str(k))
        elif isinstance(value, list | tuple):
            for i, v in enumerate(value):
                yield from self.look_like_experts(v, f"{path}[{i}]")
        elif isinstance(value, Tensor) and self.mesh.ep_size > 1 and value.dim() >= 3:
            yield from [path] if any(value.shape == expert.shape for expert in self.totals) else []

    def take_optimizer(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(tensors, the rest) of an optimizer's state that is keyed by names."""
        tensors: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for name, entries in state["state"].items():
            if not isinstance(entries, Mapping):
                rest[name] = entries
                continue
            for key, value in entries.items():
                into = tensors if isinstance(value, Tensor) else rest
                into.setdefault(name, {})[key] = self._wrapped_state(name, key, value)
        return {"state": tensors}, {**state, "state": rest}

    def _wrapped_state(self, name: str, key: str, value: Any) -> Any:
        expert = self.experts.get(name)
        if expert is None or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if not _follows(value.shape, expert.shape):
            raise ValueError(
                f"the optimizer's state {key!r} of the experts {name!r} has the shape {tuple(value.shape)} and cannot be "
                f"divided by experts as the parameter {tuple(expert.shape)} can; use an optimizer whose states have the "
                "parameter's shape"
            )
        return self._dtensor(value)

    def _dtensor(self, local: Tensor) -> DTensor:
        """Nothing is communicated, and nothing moved: the mesh is one of the tensor's own kind of device."""
        kind = local.device.type
        if kind not in self._meshes:
            groups = [self.mesh.edp_group, self.mesh.ep_group]
            ranks = self.mesh.device_mesh.mesh
            self._meshes[kind] = DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("edp", "ep"))
        return DTensor.from_local(local.detach(), self._meshes[kind], [Replicate(), Shard(0)], run_check=False)

    # -- loading

    def empty_model(self, key: Key, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Where to read a model's tensor of a global size into."""
        expert = self.expert(key[-1])
        return self._empty(
            expert if expert is not None and self._is_whole(key[-1], expert, size) else None, size, dtype
        )

    def empty_state(self, key: Key, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Where to read an optimizer's tensor at (optimizer, "state", parameter, entry) into."""
        expert = self.experts.get(key[2]) if len(key) == 4 else None
        divided = expert is not None and _follows(size, self._whole_shape(expert))
        return self._empty(expert if divided else None, size, dtype)

    def _empty(self, expert: Tensor | None, size: torch.Size, dtype: torch.dtype) -> Tensor:
        if expert is None:
            return torch.empty(size, dtype=dtype)
        return self._dtensor(torch.empty((expert.shape[0], *size[1:]), dtype=dtype))

    def cut(self, value: Any, name: Any = None) -> Any:
        """The contents of a single file with experts cut; tensors are copied out of the file."""
        if isinstance(value, Mapping):
            return type(value)((k, self.cut(v, k)) for k, v in value.items())
        if type(value) in (list, tuple):
            return type(value)(self.cut(v) for v in value)
        if not isinstance(value, Tensor):
            return value
        expert = self.expert(name)
        divided = expert is not None and self._is_whole(name, expert, value.shape)
        return (value[self._local(expert)] if divided else value).clone()

    def cut_optimizer(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """A single file's optimizer state, its parameters numbered in this optimizer's order, with experts cut."""
        parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))

        def cut(parameter: Tensor | None, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            divided = parameter in self.totals and _follows(value.shape, self._whole_shape(parameter))
            return (value[self._local(parameter)] if divided else value).clone()

        states = {n: {k: cut(parameters.get(n), v) for k, v in s.items()} for n, s in state["state"].items()}
        return {**state, "state": states}

    def _local(self, expert: Tensor) -> slice:
        return self.mesh.local_experts(self.totals[expert])

    def _whole_shape(self, expert: Tensor) -> tuple[int, ...]:
        return (self.totals[expert], *expert.shape[1:])

    def _is_whole(self, name: Any, expert: Tensor, size: torch.Size) -> bool:
        """Whether a tensor called as an expert is divided by experts. Raises ValueError when its experts are others."""
        if len(size) == expert.dim() and tuple(size) != self._whole_shape(expert):
            raise ValueError(
                f"size mismatch for the experts {name}: {tuple(size)} in the checkpoint, {self._whole_shape(expert)} in "
                "the model (all experts of all ranks)"
            )
        return len(size) > 0 and size[0] == self.totals[expert]


def _follows(size: torch.Size, shape: tuple[int, ...]) -> bool:
    """Whether a state is divided by experts as its parameter of this shape: the same shape, or factors of it."""
    return tuple(size) == tuple(shape) or (len(size) >= 2 and size[0] == shape[0])
