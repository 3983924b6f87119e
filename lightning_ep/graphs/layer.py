"""One decoder layer as four recordings around its experts, which run in between as ever:

    forward     hidden -> [before] -> tokens, ids, weights -> experts -> [after] -> out
    backward    grad hidden <- [before_bwd] <- grads of tokens, weights <- experts <- [after_bwd] <- grad out

What the part after the experts takes from the part before (the residual) stays at its address. `after_bwd` computes no more
than the experts wait for; `before_bwd` all the rest, of shared experts too. Parameter gradients are added up inside it, in
one buffer a parameter.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from lightning_ep.graphs.call import Call, Static
from lightning_ep.graphs.recorder import Recorder


class CannotRecord(RuntimeError):
    """A layer does something that a recording cannot repeat."""


class GradientBuffers:
    """Where recordings add up parameter gradients; shared by all recordings of a parameter."""

    def __init__(self) -> None:
        self._buffers: dict[nn.Parameter, Tensor] = {}

    def prepare(self, parameters: list[nn.Parameter]) -> None:
        """Allocate them, outside of any recording."""
        for parameter in parameters:
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.zeros_like(parameter, requires_grad=False)

    def add(self, parameters: list[nn.Parameter], grads: tuple[Tensor | None, ...]) -> list[nn.Parameter]:
        """Returns those that have a gradient at all."""
        pairs = [(p, grad) for p, grad in zip(parameters, grads, strict=True) if grad is not None]
        for parameter, grad in pairs:
            self._buffers[parameter].add_(grad)
        return [parameter for parameter, _ in pairs]

    def attach(self, parameters: list[nn.Parameter]) -> None:
        """Make the buffers the parameters' `.grad`, with the value that `.grad` has."""
        fresh = []
        for parameter in parameters:
            buffer = self._buffers[parameter]
            if parameter.grad is buffer:
                continue
            if parameter.grad is None:
                fresh.append(buffer)
            else:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)


class Shared:
    """What the recordings of all layers and lanes have in common: one backward runs at a time.

    Attributes:
        pool: memory for what lives within one layer's backward.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.gradients, self.pool = recorder, GradientBuffers(), recorder.new_pool()
        self._scratch: dict[tuple, Tensor] = {}

    def gradient_of(self, tensor: Tensor) -> Tensor:
        """A static tensor for an incoming gradient."""
        key = tensor.shape, tensor.dtype
        if key not in self._scratch:
            self._scratch[key] = torch.empty_like(tensor, requires_grad=False)
        return self._scratch[key]


class RecordedLayer:
    """The recordings of one layer for one micro-batch in flight.

    Args:
        forward: the layer's own.
        experts: its experts module, whose forward is replaced while recording.
        dense: its other modules, whose parameters are replaced while recording.
        call: an observed call; its tensors but the hidden states are replaced by `statics`.
        hidden: the static input, another recorded layer's output; None makes one.
        pool: memory of the activations.

    Attributes:
        busy: between a forward and its backward, whose activations are in the recordings' memory.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        experts: nn.Module,
        dense: list[nn.Module],
        call: Call,
        hidden: Tensor | None,
        statics: dict[int, Static],
        shared: Shared,
        pool: Any,
    ) -> None:
        self.busy, self.generation = False, 0
        self._shared, self._pool = shared, pool
        if hidden is None:
            hidden = torch.empty_like(call.leaves[call.hidden], device=next(experts.parameters()).device)
        self.hidden = hidden.detach().requires_grad_()
        leaves = list(call.leaves)
        leaves[call.hidden] = self.hidden
        self._statics: list[tuple[int, Static]] = []
        for i, tensor in call.other_tensors():
            if id(tensor) not in statics:
                statics[id(tensor)] = Static(tensor)
            static = statics[id(tensor)]
            static.load(tensor)
            self._statics.append((i, static))
            leaves[i] = static.tensor
        with _own_leaves(dense) as self._parameter_of:
            self._record_forward(forward, experts, *call.replaced(leaves))

    # -- recording

    def _record_forward(self, forward: Callable[..., Any], experts: nn.Module, args: tuple, kwargs: dict) -> None:
        def stop_at(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return getcurrent().parent.switch(hidden_states, top_k_index, top_k_weights)

        run = greenlet(forward)
        run.gr_context = contextvars.copy_context()
        own, experts.forward = experts.forward, stop_at
        try:
            with torch.enable_grad():
                with self._shared.recorder.record(self._pool) as self._before:
                    routed = run.switch(*args, **kwargs)
                if run.dead:
                    raise CannotRecord("its forward did not call its experts")
                self.tokens, self.ids, self.weights = routed
                self._experts_out = torch.empty_like(self.tokens, requires_grad=True)
                with self._shared.recorder.record(self._pool) as self._after:
                    result = run.switch(self._experts_out)
                if not run.dead:
                    raise CannotRecord("its forward called its experts twice")
        finally:
            experts.forward = own
        values = result if isinstance(result, tuple) else (result,)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if len(tensors) != 1:
            raise CannotRecord(f"its forward returns {len(tensors)} tensors instead of one")
        (self.out,) = tensors
        # Older layers return (hidden states, None).
        self._rest = [None if value is self.out else value for value in values] if isinstance(result, tuple) else None
        self._place = next(i for i, value in enumerate(values) if value is self.out)

    def record_backward(self, grad_out: Tensor | None) -> None:
        """Record the backward of what was recorded last; `grad_out`: the static gradient, None makes one."""
        self._grad_out = torch.empty_like(self.out, requires_grad=False) if grad_out is None else grad_out
        with self._shared.recorder.record(self._shared.pool) as self._after_bwd:
            (self._grad_experts_out,) = torch.autograd.grad(
                self.out, self._experts_out, self._grad_out, retain_graph=True
            )
        outputs, self._grad_weights = [self.out, self.tokens], None
        self._grad_tokens = self._shared.gradient_of(self.tokens)
        grad_outputs = [self._grad_out, self._grad_tokens]
        if self.weights.requires_grad:
            self._grad_weights = self._shared.gradient_of(self.weights)
            outputs.append(self.weights)
            grad_outputs.append(self._grad_weights)
        leaves = [leaf for leaf in _leaves_behind(outputs) if leaf is not self.hidden and leaf is not self._experts_out]
        parameters = [self._parameter_of.pop(leaf, leaf) for leaf in leaves]
        self._shared.gradients.prepare(parameters)
        with self._shared.recorder.record(self._shared.pool) as self._before_bwd:
            grads = torch.autograd.grad(outputs, [self.hidden, *leaves], grad_outputs, allow_unused=True)
            self.grad_hidden = grads[0]
            self.parameters = self._shared.gradients.add(parameters, grads[1:])
        # From here on only addresses matter: no graph holds the memory of activations any more.
        self._parameter_of.clear()
        self.tokens, self.weights = self.tokens.detach(), self.weights.detach()
        self.out, self._experts_out = self.out.detach(), self._experts_out.detach()

    # -- replaying

    def run(self, call: Call, experts: Callable[[Tensor, Tensor, Tensor], Tensor], anchor: Tensor) -> Any:
        """The layer's forward; `anchor` needs a gradient, so that the backward runs whatever the input needs."""
        use = _Use(self)
        for i, static in self._statics:
            static.load(call.leaves[i])
        tokens, ids, weights = _Before.apply(use, call.leaves[call.hidden], anchor)
        out = _After.apply(use, experts(tokens, ids, weights))
        if self._rest is None:
            return out
        return (*self._rest[: self._place], out, *self._rest[self._place + 1 :])


class _Use:
    """One forward's claim on a layer's recordings, until its backward is done or its graph is gone."""

    def __init__(self, layer: RecordedLayer) -> None:
        layer.busy = True
        layer.generation += 1
        self.layer, self._generation = layer, layer.generation

    def check(self) -> None:
        if self.layer.generation != self._generation or not self.layer.busy:
            raise RuntimeError(
                "cuda_graph_scope: a second backward through the same forward; its activations are gone. Set "
                "cuda_graph_scope to nothing for a model that needs it"
            )

    def release(self) -> None:
        if self.layer.generation == self._generation:
            self.layer.busy = False

    def __del__(self) -> None:
        self.release()


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: _Use, hidden: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = use.layer
        # Autograd would make the static gradient itself a leaf's `.grad`.
        ctx.use, ctx.is_leaf = use, hidden.is_leaf
        ctx.set_materialize_grads(False)
        _load(layer.hidden.detach(), hidden)
        layer._before.replay()
        ids = layer.ids.detach()
        ctx.mark_non_differentiable(ids)
        return layer.tokens.detach(), ids, layer.weights.detach()

    @staticmethod
    def backward(ctx: Any, grad_tokens: Tensor | None, _: None, grad_weights: Tensor | None) -> tuple:
        layer = ctx.use.layer
        ctx.use.check()
        _load(layer._grad_tokens, grad_tokens)
        if layer._grad_weights is not None:
            _load(layer._grad_weights, grad_weights)
        layer._before_bwd.replay()
        ctx.use.release()
        for parameter in layer.parameters:
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        grad_hidden = layer.grad_hidden.clone() if ctx.is_leaf else layer.grad_hidden.detach()
        return None, grad_hidden, None


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: _Use, experts_out: Tensor) -> Tensor:
        layer = use.layer
        ctx.use = use
        _load(layer._experts_out, experts_out)
        layer._after.replay()
        return layer.out.detach()

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple:
        layer = ctx.use.layer
        ctx.use.check()
        layer._shared.gradients.attach(layer.parameters)
        _load(layer._grad_out, grad_out)
        layer._after_bwd.replay()
        return None, layer._grad_experts_out.detach()


def _load(static: Tensor, source: Tensor | None) -> None:
    if source is None:
        static.zero_()
    elif source.data_ptr() != static.data_ptr():
        static.copy_(source)


@contextmanager
def _own_leaves(modules: list[nn.Module]) -> Iterator[dict[Tensor, nn.Parameter]]:
    """Parameters replaced by other leaves on the same memory; yields leaf -> parameter.

    Autograd hands a gradient to a parameter on the stream of its first use, for as long as a graph that used it is alive: a
    loss that the user keeps would tie the recording's stream to the default stream, which cannot be recorded.
    """
    leaves: dict[nn.Parameter, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                if parameter not in leaves:
                    leaves[parameter] = parameter.detach().requires_grad_()
                replaced.append((module._parameters, name, parameter))
    for held, name, parameter in replaced:
        held[name] = leaves[parameter]
    try:
        yield {leaf: parameter for parameter, leaf in leaves.items()}
    finally:
        for held, name, parameter in replaced:
            held[name] = parameter


def _leaves_behind(outputs: list[Tensor]) -> list[Tensor]:
    """The leaves of the autograd graph behind `outputs`, each once."""
    leaves: dict[Tensor, None] = {}
    seen, waiting = set(), [output.grad_fn for output in outputs if output.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                leaves[node.variable] = None
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return list(leaves)
