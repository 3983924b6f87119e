"""Which calls of a layer its recordings serve, and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_ep.experts.interface import find_experts
from lightning_ep.experts.layer import MoELayer
from lightning_ep.graphs.dense import DenseGraphs
from tests.graphs.tape import TapeRecorder
from tests.reference import tiny_model, tokens


class Pair:
    """A model whose layers are recorded, and the same model without."""

    def __init__(self, change: Callable[[nn.Module], None] = lambda model: None, model_type: str = "qwen3_moe") -> None:
        self.model, self.plain = (tiny_model(model_type, use_cache=False, output_router_logits=False) for _ in range(2))
        change(self.model), change(self.plain)
        self.recorder = TapeRecorder()
        self.graphs = DenseGraphs(self.model.model, find_experts(self.model), self.recorder, nullcontext)

    @property
    def replays(self) -> int:
        return sum(tape.replays for tape in self.recorder.tapes)

    def losses(self, ids: Tensor) -> list[Tensor]:
        return [model(input_ids=ids, labels=ids).loss for model in (self.model, self.plain)]

    def step(self, ids: Tensor, served: bool = True) -> None:
        """A forward and backward of both; they agree, and recordings served it, or not."""
        before = self.replays
        self.graphs.record_wanted()
        losses = self.losses(ids)
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        self.assert_same_gradients()
        assert (self.replays > before) == served

    def assert_same_gradients(self) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_gradients_add_up_over_steps_eager_and_recorded() -> None:
    pair = Pair()
    for step in range(4):
        pair.step(tokens(step, 0, 0), served=step > 0)
    for model in (pair.model, pair.plain):
        model.zero_grad(set_to_none=False)
    pair.step(tokens(5, 0, 0))
    for model in (pair.model, pair.plain):
        model.zero_grad()
    pair.step(tokens(6, 0, 0))


def test_another_shape_runs_as_ever_and_says_so_once() -> None:
    pair = Pair()
    pair.step(tokens(0, 0, 0), served=False)
    pair.step(tokens(1, 0, 0))
    with pytest.warns(UserWarning, match=r"hidden states \(2, 5, 32\), recorded for \(2, \d+, 32\)"):
        pair.step(tokens(2, 0, 0)[:, :5], served=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.step(tokens(3, 0, 0)[:1], served=False)
    pair.step(tokens(4, 0, 0))


def test_evaluation_runs_as_ever() -> None:
    pair = Pair()
    pair.step(tokens(0, 0, 0), served=False)
    pair.step(tokens(1, 0, 0))
    before = pair.replays
    with torch.no_grad():
        assert torch.equal(*pair.losses(tokens(2, 0, 0)))
    assert pair.replays == before


def test_a_forward_without_backward_frees_its_lane() -> None:
    pair = Pair()
    pair.step(tokens(0, 0, 0), served=False)
    pair.graphs.record_wanted()
    losses = pair.losses(tokens(1, 0, 0))
    assert any(layer.busy for layer in pair.graphs._lanes[0])
    del losses
    assert not any(layer.busy for layer in pair.graphs._lanes[0])
    pair.step(tokens(2, 0, 0))
    assert len(pair.graphs._lanes) == 1


def test_two_micro_batches_in_flight_have_a_lane_each() -> None:
    pair = Pair()
    pair.step(tokens(0, 0, 0), served=False)
    for round in range(2):  # the second lane is recorded when it was missed once
        pair.graphs.record_wanted()
        before = pair.replays
        both = [pair.losses(tokens(1 + round, micro, 0)) for micro in range(2)]
        for one, other in zip(*both, strict=True):
            (one + other).backward()
        for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)  # added up in another order
        layers = len(pair.graphs._layers)
        # In lane 1 only the first layer: memory of the others is that of lane 0's, whose backward has not begun.
        assert pair.replays - before == (4 * layers if round == 0 else 4 * layers + 4)
    assert len(pair.graphs._lanes) == 2


def test_a_second_backward_is_an_error() -> None:
    pair = Pair()
    pair.step(tokens(0, 0, 0), served=False)
    pair.graphs.record_wanted()
    loss, _ = pair.losses(tokens(1, 0, 0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through the same forward"):
        loss.backward()


@pytest.mark.parametrize("part", ["self_attn", "mlp.gate", "mlp.experts", "embed_tokens", "input_layernorm"])
def test_frozen_parts(part: str) -> None:
    def freeze(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(part not in name)

    pair = Pair(freeze)
    for step in range(3):
        pair.step(tokens(step, 0, 0), served=step > 0)


def test_hidden_states_that_are_a_leaf_keep_their_own_gradient() -> None:
    pair = Pair()
    leaves = [torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)]
    for step in range(3):
        pair.graphs.record_wanted()
        for model, leaf in zip((pair.model, pair.plain), leaves, strict=True):
            leaf.grad = None
            for micro in range(2):
                model(inputs_embeds=leaf, labels=tokens(step, micro, 0)[:, :6]).loss.backward()
        assert torch.equal(leaves[0].grad, leaves[1].grad), step
    assert pair.replays > 0


def test_a_copy_of_the_model_has_its_own_forward() -> None:
    pair = Pair()
    pair.step(tokens(0, 0, 0), served=False)
    pair.step(tokens(1, 0, 0))
    copied, before = copy.deepcopy(pair.model), pair.replays
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(0.5)
        for p in pair.plain.parameters():
            p.mul_(0.5)
    ids = tokens(2, 0, 0)
    assert torch.equal(copied(input_ids=ids, labels=ids).loss, pair.plain(input_ids=ids, labels=ids).loss)
    assert pair.replays == before


def test_closing_gives_the_layers_their_forward_back() -> None:
    pair = Pair()
    pair.step(tokens(0, 0, 0), served=False)
    pair.graphs.close()
    assert not any("_dense_graph" in vars(m) or "forward" in vars(m) for m in pair.model.model.layers)
    assert torch.equal(*pair.losses(tokens(1, 0, 0)))


def _freeze(model: nn.Module, frozen: bool = True) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(not (frozen and "self_attn" in name))
        p.grad = None


def _thaw(model: nn.Module) -> None:
    _freeze(model, frozen=False)


def _move(model: nn.Module) -> None:
    """As optimizers and averaging do that keep all parameters in one vector."""
    parameters = list(model.parameters())
    torch.nn.utils.vector_to_parameters(0.9 * torch.nn.utils.parameters_to_vector(parameters), parameters)


def _more(model: nn.Module) -> None:
    """As adapters do that are added later."""
    torch.manual_seed(0)
    layer = model.model.layers[0].self_attn.q_proj
    own, layer.added = layer.forward, nn.Linear(layer.in_features, layer.out_features)
    layer.forward = lambda x: own(x) + layer.added(x)


@pytest.mark.parametrize("before, after", [(_freeze, _thaw), (_thaw, _freeze), (_thaw, _move), (_thaw, _more)])
def test_layers_that_change_are_recorded_anew(before: Callable, after: Callable) -> None:
    pair = Pair(before)
    pair.step(tokens(0, 0, 0), served=False)
    pair.step(tokens(1, 0, 0))
    for change in (after, before if after is not _more else _move):
        change(pair.model), change(pair.plain)
        with pytest.warns(UserWarning, match="run without graphs") if change is after else nullcontext():
            losses = pair.losses(tokens(2, 0, 0))  # in the window, before the next recordings
        assert torch.equal(*losses)
        del losses
        for step in range(3, 5):
            pair.step(tokens(step, 0, 0))


def test_the_mode_that_was_recorded_is_the_only_one_served() -> None:
    def drop_out(model: nn.Module) -> None:
        for layer in model.train().model.layers:
            layer.self_attn.attention_dropout = 0.5

    pair = Pair(drop_out)
    pair.losses(tokens(0, 0, 0))
    pair.graphs.record_wanted()
    pair.losses(tokens(0, 0, 0))
    pair.model.eval(), pair.plain.eval()
    with pytest.warns(UserWarning, match="run without graphs"):
        assert torch.equal(*pair.losses(tokens(1, 0, 0)))
    pair.step(tokens(2, 0, 0))


def test_hooks_that_come_later_are_not_passed_over() -> None:
    pair, seen = Pair(), []
    pair.step(tokens(0, 0, 0), served=False)
    pair.step(tokens(1, 0, 0))
    hook = pair.model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="run without graphs"):
        pair.losses(tokens(2, 0, 0))
    assert seen
    with pytest.raises(RuntimeError, match=r"mlp\.gate has hooks"):
        pair.graphs.record_wanted()
    hook.remove()
    pair.step(tokens(3, 0, 0))


def test_hooks_of_the_layer_itself_run() -> None:
    pair, seen = Pair(), []
    pair.model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    pair.step(tokens(0, 0, 0), served=False)
    pair.step(tokens(1, 0, 0))
    assert len(seen) == 2


def test_experts_outside_the_named_module_are_an_error() -> None:
    model = tiny_model("qwen3_moe", use_cache=False)
    with pytest.raises(ValueError, match=r"2 of 2 experts modules, the first is 'model\.layers\.0\.mlp\.experts'"):
        DenseGraphs(model, find_experts(model), TapeRecorder(), nullcontext)


def _hook(model: nn.Module) -> None:
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: None)


def _gradient_hook(model: nn.Module) -> None:
    model.model.layers[1].self_attn.q_proj.weight.register_hook(lambda grad: grad)


def _statistics(model: nn.Module) -> None:
    model.model.layers[1].self_attn.extra = nn.BatchNorm1d(4)


def _checkpointed(model: nn.Module) -> None:
    model.train().gradient_checkpointing_enable()


def _cache(model: nn.Module) -> None:
    model.config.use_cache = True


def _no_experts_called(model: nn.Module) -> None:
    model.model.layers[1].mlp.forward = lambda x: x


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_hook, "mlp.gate has hooks"),
        (_gradient_hook, "a parameter has gradient hooks"),
        (_statistics, "self_attn.extra keeps running statistics"),
        (_checkpointed, "its activations are recomputed"),
        (_no_experts_called, "its forward did not call its experts"),
    ],
)
def test_what_cannot_be_recorded_is_named(change: Callable[[nn.Module], None], why: str) -> None:
    pair = Pair(change)
    pair.losses(tokens(0, 0, 0))
    with pytest.raises(RuntimeError, match=rf"cuda_graph_scope: layer 'layers.\d' .* cannot be recorded: {why}"):
        pair.graphs.record_wanted()


def test_our_own_layer_keeps_its_routing() -> None:
    stack = nn.Module()
    stack.layers = nn.ModuleList([MoELayer(8, 4, 2, 2)])
    graphs = DenseGraphs(stack, find_experts(stack), TapeRecorder(), nullcontext)
    stack.layers[0](torch.randn(3, 8))
    with pytest.raises(RuntimeError, match="it keeps the routing for its auxiliary loss"):
        graphs.record_wanted()


def test_a_cache_is_named() -> None:
    pair = Pair(_cache)
    pair.losses(tokens(0, 0, 0))
    with pytest.raises(RuntimeError, match=r"layer 'layers.0' .* an argument of type DynamicCache .*use_cache=False"):
        pair.graphs.record_wanted()
