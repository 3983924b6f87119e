"""The dense parts of all MoE layers as recordings: attention, norms, routers, shared experts cost four launches a layer.

Where the host launches slower than the GPU computes, hidden communication cannot show; this takes the host's work away.
The experts and their exchange run as ever, since their shapes change with the routing.

The first micro-batch runs as ever and is observed. Recordings are made between accumulation windows, for micro-batches of
that shape; others run as ever. A micro-batch whose backward is still to come keeps its activations in the recordings'
memory, so two in flight need two sets ("lanes"). They share memory: beside the backward of one, in layers L-1, L-2, ... 0,
runs the forward of the other, in layers 0, 1, ... L-1, and its layer j takes over what layer L-j has just left:

    lane 0    layer      0     1     2     3
              memory     m0    m1    m2    m3
    lane 1    layer      0     1     2     3
              memory     m4    m3    m2    m1
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_ep.experts.interface import FoundExperts
from lightning_ep.experts.layer import MoELayer
from lightning_ep.graphs.call import Call, Static
from lightning_ep.graphs.layer import CannotRecord, RecordedLayer, Shared
from lightning_ep.graphs.recorder import Recorder

_LANES = 2
# Where transformers' hooks live that collect router logits and hidden states when a caller asks for them.
_COLLECTING = "transformers.utils.output_capturing"
# The lane of the forward that is running; halves of a split batch have their own.
_lane: ContextVar[int | None] = ContextVar("lane", default=None)


class DenseGraphs:
    """Replaces the forward of every layer that holds experts, while installed.

    Args:
        stack: the module that holds the layers.
        recorder: makes the recordings.
        precision: entered around recording, as around a training step.
    """

    def __init__(
        self,
        stack: nn.Module,
        experts: list[FoundExperts],
        recorder: Recorder,
        precision: Callable[[], AbstractContextManager],
    ) -> None:
        self._shared, self._precision = Shared(recorder), precision
        self._layers = [_Layer(self, i, *found) for i, found in enumerate(_layers(stack, experts))]
        self._lanes: list[list[RecordedLayer]] = []
        self._recorded_state: list[tuple] = []
        self._pools: list[Any] = []
        self._wanted = 1
        self._last_out: Tensor | None = None
        self._warned = False
        self._anchor = torch.zeros((), device=next(stack.parameters()).device, requires_grad=True)

    def close(self) -> None:
        """Give the layers their own forwards back."""
        for layer in self._layers:
            layer.remove()
        self._lanes.clear()

    # -- between windows

    def want(self, lanes: int) -> None:
        """So many micro-batches (or halves) will be in flight; more than was said so far, or it changes nothing."""
        self._wanted = max(self._wanted, lanes)

    def record_wanted(self) -> None:
        """Make recordings that were asked for; call it when no micro-batch is in flight.

        Raises RuntimeError for a model that cannot be recorded, naming the layer and why.
        """
        self._last_out = None
        if self._lanes and self._state() != self._recorded_state:
            self._lanes.clear()
            self._pools = []
        while len(self._lanes) < self._wanted and all(layer.observed is not None for layer in self._layers):
            if not self._pools:
                self._pools = [self._shared.recorder.new_pool() for _ in range(len(self._layers) + 1)]
            self._recorded_state = self._state()
            self._lanes.append(self._record_lane(len(self._lanes)))
            rank_zero_info(
                f"ep_overlap: CUDA graphs of the dense parts of {len(self._layers)} layers recorded "
                f"(set {len(self._lanes)} of at most {_LANES})"
            )

    def _record_lane(self, lane: int) -> list[RecordedLayer]:
        statics: dict[int, Static] = {}
        recorded: list[RecordedLayer] = []
        cache = torch.is_autocast_cache_enabled()
        # What is recorded need not run, so there is no NaN to detect yet.
        with self._precision(), torch.autograd.set_detect_anomaly(False):
            torch.set_autocast_cache_enabled(False)  # every recording casts the weights of its time
            try:
                for layer in self._layers:
                    hidden = recorded[-1].out if layer.follows else None
                    recorded.append(layer.record(hidden, statics, self._shared, self._pool(lane, layer)))
                following: RecordedLayer | None = None
                for layer, one in zip(reversed(self._layers), reversed(recorded), strict=True):
                    layer.record_backward(one, following.grad_hidden if following is not None else None)
                    following = one if layer.follows else None
            finally:
                torch.set_autocast_cache_enabled(cache)
        return recorded

    def _state(self) -> list[tuple]:
        return [layer.state() for layer in self._layers]

    def _pool(self, lane: int, layer: _Layer) -> Any:
        return self._pools[layer.index if lane == 0 else self._partner(layer)]

    def _partner(self, layer: _Layer) -> int:
        """Index of the layer whose memory in the other lane is this one's; the number of layers where there is none."""
        return len(self._layers) - layer.index

    # -- in a forward

    def run(self, layer: _Layer, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The layer's call, replayed where a recording serves."""
        if not torch.is_grad_enabled():
            return layer.own(*args, **kwargs)
        call = Call(args, kwargs)
        if layer.observed is None:
            return self._observed(layer, call, args, kwargs)
        if layer.index == 0:
            _lane.set(None if self._is_collecting() or self._has_changed() else self._free_lane())
        lane = _lane.get()
        if lane is None or not self._serves(lane, layer, call):
            return layer.own(*args, **kwargs)
        return self._lanes[lane][layer.index].run(call, layer.experts, self._anchor)

    def _observed(self, layer: _Layer, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        layer.observed = call
        if call.hidden >= 0:
            layer.follows = layer.index > 0 and call.leaves[call.hidden] is self._last_out
            call.forget_hidden()
        out = layer.own(*args, **kwargs)
        self._last_out = out[0] if isinstance(out, tuple) else out
        return out

    def _free_lane(self) -> int | None:
        for lane, layers in enumerate(self._lanes):
            if not any(layer.busy for layer in layers):
                return lane
        if self._lanes:
            self.want(min(len(self._lanes) + 1, _LANES))
        return None

    def _is_collecting(self) -> bool:
        """Whether the model's caller wants what is computed inside the layers, with gradients."""
        collector = getattr(sys.modules.get(_COLLECTING), "_active_collector", None)
        collecting = collector is not None and bool(collector.get())
        if collecting:
            self._warn("router logits or hidden states are collected from the layers: set output_router_logits=False")
        return collecting

    def _has_changed(self) -> bool:
        """Whether the layers are not those recorded; if that lasts, they are recorded anew before the next window."""
        changed = bool(self._lanes) and self._state() != self._recorded_state
        if changed:
            self._warn("parameters were frozen, unfrozen or moved, hooks were added, or train() and eval() called")
        return changed

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(f"cuda_graph_scope: some micro-batches run without graphs: {why}")

    def _serves(self, lane: int, layer: _Layer, call: Call) -> bool:
        assert layer.observed is not None
        if not call.is_like(layer.observed):
            shape, recorded = (tuple(each.leaves[each.hidden].shape) for each in (call, layer.observed))
            self._warn(
                f"hidden states {shape}, recorded for {recorded}: give all batches the same shape"
                if shape != recorded
                else f"other arguments of {layer.name!r} than those recorded"
            )
            return False
        if self._lanes[lane][layer.index].busy:  # called twice in one forward
            return False
        # The layer that shares this one's memory must have been left by its backward.
        partner = self._partner(layer)
        others = [layers for other, layers in enumerate(self._lanes) if other != lane]
        return not any(layers[partner].busy for layers in others if partner < len(layers))


class _Layer:
    """One layer of the stack and its own forward."""

    def __init__(self, graphs: DenseGraphs, index: int, name: str, module: nn.Module, experts: nn.Module) -> None:
        self.graphs, self.index, self.name, self.module, self.experts = graphs, index, name, module, experts
        self.own, self._replaced = module.forward, module.__dict__.get("forward")
        self.observed: Call | None = None
        self.follows = False  # whether its input is the output of the layer before
        inside = set(experts.modules())
        self._dense = [each for each in module.modules() if each not in inside]
        object.__setattr__(module, "_dense_graph", self)
        module.forward = MethodType(_forward, module)

    def __deepcopy__(self, memo: dict) -> _Layer:
        return self  # whoever copies the model (weight averaging) has a forward of its own, see _forward

    def remove(self) -> None:
        del self.module.forward
        if self._replaced is not None:
            self.module.forward = self._replaced
        object.__delattr__(self.module, "_dense_graph")

    def state(self) -> tuple:
        """What a recording takes for granted of the layer's dense parts, which differs when it is no longer so."""
        tensors = [
            t for m in self._dense for held in (m._parameters, m._buffers) for t in held.values() if t is not None
        ]
        return (
            [t.data_ptr() for t in tensors],
            [(t.requires_grad, bool(t._backward_hooks)) for t in tensors],
            [m.training for m in self._dense],
            [len(hooks) for m in self._dense for hooks in (m._modules, *_hooks(m))],
        )

    def obstacle(self) -> str | None:
        """Why this layer cannot be recorded, or None."""
        if getattr(self.module, "gradient_checkpointing", False):
            return "its activations are recomputed (gradient_checkpointing)"
        for name, module in self.module.named_modules():
            # Those of the layer itself run around its forward, as ever.
            hooks = () if module is self.module else _hooks(module)
            if any(hook.__module__ != _COLLECTING for each in hooks for hook in each.values()):
                return f"{name} has hooks"
            if isinstance(module, nn.modules.batchnorm._NormBase):
                return f"{name or 'it'} keeps running statistics"
            if isinstance(module, MoELayer):
                return f"{name or 'it'} keeps the routing for its auxiliary loss"
        if any(p._backward_hooks for p in self.module.parameters()):
            return "a parameter has gradient hooks"
        return None

    def record(self, hidden: Tensor | None, statics: dict[int, Static], shared: Shared, pool: Any) -> RecordedLayer:
        assert self.observed is not None
        return self._named(
            lambda: RecordedLayer(self.own, self.experts, self._dense, self.observed, hidden, statics, shared, pool)
        )

    def record_backward(self, recorded: RecordedLayer, grad_out: Tensor | None) -> None:
        self._named(lambda: recorded.record_backward(grad_out))

    def _named(self, work: Callable[[], Any]) -> Any:
        """Do it, or say which layer cannot be recorded."""
        assert self.observed is not None
        try:
            if (why := self.obstacle() or self.observed.obstacle()) is not None:
                raise CannotRecord(why)
            return work()
        except RuntimeError as error:
            raise RuntimeError(
                f"cuda_graph_scope: layer {self.name!r} ({type(self.module).__name__}) cannot be recorded: {error}. Set "
                "cuda_graph_scope to nothing for this model"
            ) from error


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    layer: _Layer = module._dense_graph
    if module is not layer.module:  # a copy of the model
        return type(module).forward(module, *args, **kwargs)
    return layer.graphs.run(layer, args, kwargs)


def _layers(stack: nn.Module, experts: list[FoundExperts]) -> list[tuple[str, nn.Module, nn.Module]]:
    """(name, layer, its experts) for every child of the stack's lists that holds experts.

    Raises ValueError for a layer with more than one experts module, and when not all experts are in such a layer.
    """
    wanted = {found.module for found in experts}
    layers = []
    for list_name, children in stack.named_children():
        if not isinstance(children, nn.ModuleList):
            continue
        for name, child in children.named_children():
            inside = [m for m in child.modules() if m in wanted]
            if len(inside) > 1:
                raise ValueError(
                    f"cuda_graph_scope: layer '{list_name}.{name}' has {len(inside)} experts modules instead of one"
                )
            if inside:
                layers.append((f"{list_name}.{name}", child, inside[0]))
    if missing := wanted - {experts for _, _, experts in layers}:
        name = next(found.name for found in experts if found.module in missing)
        raise ValueError(
            f"cuda_graph_scope: {len(missing)} of {len(wanted)} experts modules, the first is {name!r}, are in no list of "
            f"layers of the split module ({type(stack).__name__}); name the module that owns the list of layers by "
            "overlap_split_module, or set cuda_graph_scope to nothing"
        )
    return layers
