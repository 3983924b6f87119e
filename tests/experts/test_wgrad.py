"""What autograd does for a parameter, the queue does: sums, order, hooks, once each; and it keeps nothing."""

from __future__ import annotations

import gc
import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lightning_ep.dispatch.base import ExpertRows
from lightning_ep.experts import gemm, wgrad_kernels
from lightning_ep.experts.gemm import Split, TorchGemm
from lightning_ep.experts.grouped import grouped_experts
from lightning_ep.experts.layer import _LAYOUT, Experts
from lightning_ep.experts.wgrad import WeightGradQueue, gradient_buffer
from tests.distributed import run_distributed
from tests.experts.spread import make_mesh, random_batch, spread

D, I, L = 16, 24, 4
MODES = {"delayed": (True, False), "fused": (False, True), "both": (True, True)}


def make_queue(mode: str) -> WeightGradQueue | None:
    if mode == "autograd":
        return None
    queue = WeightGradQueue(fuse=MODES[mode][1])
    queue.delay = MODES[mode][0]
    return queue


def make_experts(dtype: torch.dtype = torch.float32) -> Experts:
    torch.manual_seed(0)
    return Experts(D, I, L, initializer_range=0.5).to(dtype)


def rows(counts: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> ExpertRows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), D, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(sum(counts), generator=generator)
    return ExpertRows(x, weights, torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), counts)


def apply(experts: Experts, counts: list[int], queue: WeightGradQueue | None, layer: int = 0, seed: int = 0) -> Tensor:
    """A scalar that depends on both weights of every expert with rows."""
    dtype = experts.down_proj.dtype
    return grouped_experts(experts, _LAYOUT, rows(counts, seed, dtype), TorchGemm(), layer, queue).square().sum()


def flush(queue: WeightGradQueue | None) -> None:
    if queue is not None:
        queue.flush()
        queue.assert_empty()


def gradients(mode: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights used in two layers, over three micro-batches; expert 2 never gets a row, in one layer nobody does."""
    experts, queue = make_experts(dtype), make_queue(mode)
    for seed, second in enumerate(([2, 0, 0, 1], [0, 0, 0, 0], [1, 3, 0, 2])):
        loss = apply(experts, [3, 1, 0, 5], queue, 0, seed) + apply(experts, second, queue, 1, seed + 10)
        loss.backward()
        flush(queue)
    return {name: p.grad for name, p in experts.named_parameters()}


@pytest.mark.parametrize("mode", ["delayed", "both"])
def test_delay_changes_no_bit(mode: str) -> None:
    expected = gradients("autograd" if mode == "delayed" else "fused")
    for name, grad in gradients(mode).items():
        assert torch.equal(grad, expected[name]), name
        assert not grad[2].any()


def test_fused_gradients_are_the_same_but_for_the_order_of_sums() -> None:
    expected = gradients("autograd")
    for name, grad in gradients("fused").items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-5)


def test_half_precision_adds_up_in_float32() -> None:
    exact, plain, fused = (
        gradients("autograd"),
        gradients("autograd", torch.bfloat16),
        gradients("fused", torch.bfloat16),
    )
    for name, want in exact.items():
        assert plain[name].dtype == torch.bfloat16 and fused[name].dtype == torch.float32
        errors = [((got[name] - want).norm() / want.norm()).item() for got in (plain, fused)]
        assert errors[1] < errors[0] < 0.05, (name, errors)


# -- hooks, freezing, counting


class Watch:
    """Whether each parameter's post-accumulate hook found a gradient, by name, in the order of the calls."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[str, float]] = []
        for name, p in module.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self.calls.append((name, p.grad.sum().item())))


def hook_calls(mode: str) -> list[tuple[str, float]]:
    experts, queue = make_experts(), make_queue(mode)
    watch = Watch(experts)
    for seed in range(2):
        (apply(experts, [3, 1, 0, 5], queue, 0, seed) + apply(experts, [1, 1, 1, 1], queue, 1, seed)).backward()
        flush(queue)
    return sorted(watch.calls)


@pytest.mark.parametrize("mode", MODES)
def test_post_accumulate_hooks_run_once_a_backward_with_the_whole_gradient(mode: str) -> None:
    """Also for weights that two layers share; values are those that autograd's own hooks see."""
    expected, actual = hook_calls("autograd"), hook_calls(mode)
    assert [name for name, _ in actual] == [name for name, _ in expected] == ["down_proj"] * 2 + ["gate_up_proj"] * 2
    torch.testing.assert_close([value for _, value in actual], [value for _, value in expected], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_hook_still_changes_the_gradient(mode: str) -> None:
    expected = gradients("autograd")
    experts, queue = make_experts(), make_queue(mode)
    experts.down_proj.register_hook(lambda grad: 2 * grad)
    apply(experts, [3, 1, 0, 5], queue).backward()
    flush(queue)
    once = make_experts()
    apply(once, [3, 1, 0, 5], None).backward()
    torch.testing.assert_close(experts.down_proj.grad, 2 * once.down_proj.grad)
    assert expected.keys() == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("mode", MODES)
def test_frozen_weights_push_nothing(mode: str) -> None:
    experts, queue = make_experts(), make_queue(mode)
    experts.down_proj.requires_grad_(False)
    pushed = record_pushes(queue)
    apply(experts, [3, 1, 0, 5], queue).backward()
    flush(queue)
    assert pushed == ["gate_up_proj of layer 0"]
    assert experts.down_proj.grad is None and experts.gate_up_proj.grad is not None


def record_pushes(queue: WeightGradQueue) -> list[str]:
    pushed, push = [], queue.push

    def recorded(parameter: nn.Parameter, layer: int, grad: Any) -> None:
        name = "down_proj" if parameter.shape == (L, D, I) else "gate_up_proj"
        pushed.append(f"{name} of layer {layer}")
        push(parameter, layer, grad)

    queue.push = recorded
    return pushed


@pytest.mark.parametrize("mode", MODES)
def test_each_weight_gradient_is_computed_exactly_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, ...]] = []
    for name in ("weight_grad", "add_weight_grad"):
        original = getattr(TorchGemm, name)

        def counted(self: TorchGemm, *args: Any, original: Any = original) -> Any:
            computed.append(tuple(args[-3].shape))
            return original(self, *args)

        monkeypatch.setattr(TorchGemm, name, counted)
    experts, queue = make_experts(), make_queue(mode)
    (apply(experts, [3, 1, 0, 5], queue, 0) + apply(experts, [1, 1, 1, 1], queue, 1)).backward()
    flush(queue)
    flush(queue)
    assert sorted(computed) == [(4, D), (4, I), (9, D), (9, I)]


def test_no_grad_and_inference_leave_no_trace() -> None:
    experts, queue = make_experts(), make_queue("both")
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            apply(experts, [3, 1, 0, 5], queue)
    apply(experts, [3, 1, 0, 5], queue).backward()
    flush(queue)
    assert experts.down_proj.grad.isfinite().all()


def test_a_graph_without_a_backward_leaves_nothing() -> None:
    experts, queue = make_experts(), make_queue("delayed")
    apply(experts, [3, 1, 0, 5], queue)
    loss = apply(experts, [3, 1, 0, 5], queue)
    torch.autograd.grad(loss, [p for p in experts.parameters()], allow_unused=True)
    queue.assert_empty()


# -- any parameter


class _TwiceLinear(Function):
    """A dense layer that leaves its weight's gradient to a queue."""

    @staticmethod
    def forward(ctx, x: Tensor, ticket: Tensor, weight: nn.Parameter, queue: WeightGradQueue) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return x @ weight.detach().t()

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        ctx.queue.push(ctx.weight, -1, _Product(grad, x))
        return grad @ ctx.weight.detach(), grad.new_empty(0), None, None


class _Product:
    def __init__(self, grad: Tensor, x: Tensor) -> None:
        self.grad, self.x = grad, x

    def compute(self) -> Tensor:
        return self.grad.t() @ self.x

    def add_to(self, buffer: Tensor) -> None:
        buffer.addmm_(self.grad.t(), self.x)


@pytest.mark.parametrize("mode", MODES)
def test_the_queue_is_not_for_experts_only(mode: str) -> None:
    torch.manual_seed(0)
    queue, weight, x = make_queue(mode), nn.Parameter(torch.randn(5, 5)), torch.randn(3, 5, requires_grad=True)
    out = x
    for _ in range(2):
        out = _TwiceLinear.apply(out, queue.ticket(weight), weight, queue)
    out.square().sum().backward()
    flush(queue)
    again = weight.detach().clone().requires_grad_()
    (x.detach() @ again.t() @ again.t()).square().sum().backward()
    torch.testing.assert_close(weight.grad, again.grad)


# -- memory


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_flatten(out)[0]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, t.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_accumulation_has_no_temporary_of_weight_size(dtype: torch.dtype, transposed: bool) -> None:
    counts = [3, 0, 7, 2]
    split = Split(torch.tensor(counts).cumsum(0, dtype=torch.int32), counts)
    torch.manual_seed(0)
    grad, x = torch.randn(12, 6).to(dtype), torch.randn(12, 10).to(dtype)
    shape = (4, 10, 6) if transposed else (4, 6, 10)
    start = torch.randn(shape)
    out = start.clone()
    with Largest() as largest:
        TorchGemm().add_weight_grad(out, grad, x, split, transposed)
    expected = start + TorchGemm().weight_grad(grad.float(), x.float(), split, transposed)
    torch.testing.assert_close(
        out, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=3e-2 if dtype == torch.bfloat16 else 1e-5
    )
    assert torch.equal(out[1], start[1])
    assert largest.elements <= out[0].numel()


@pytest.mark.parametrize("shape", [(5, 3), (40, 70), (128, 33)])
@pytest.mark.parametrize("counts", [[3, 0, 41, 16], [0, 0, 0, 0], [64, 1, 0, 0]])
def test_the_kernel_adds_what_a_gemm_an_expert_adds(
    shape: tuple[int, int], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgrad_kernels, "_TILE", (32, 64))
    monkeypatch.setattr(wgrad_kernels, "_ROWS", 16)
    torch.manual_seed(0)
    split = Split(torch.tensor(counts).cumsum(0, dtype=torch.int32), counts)
    # not bfloat16: the interpreter multiplies its bits
    left, right = (torch.randn(sum(counts), n).to(torch.float16) for n in shape)
    out = torch.randn(len(counts), *shape)
    expected = out.clone()
    gemm.add_outer(expected, left.float(), right.float(), split)
    wgrad_kernels.add_outer(out, left, right, split.offsets_L)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def held_while_running() -> dict[str, Any]:
    """Layers whose rows wait at the same time, at most; and tensors alive after each backward."""
    mesh = make_mesh(2)
    layers = [spread(make_big(), mesh, delay_wgrad_compute=True) for _ in range(4)]
    queue = layers[0][1].queue
    for _, parallel in layers:  # as in one model: one queue for all
        found = parallel.experts[0].module
        ep = found._expert_parallel
        ep.queue, ep.layer, ep.dispatcher.after_dispatch_grad = queue, layers.index((found, parallel)), queue.flush
    most: list[int] = []
    push = queue.push

    def watched(parameter: nn.Parameter, layer: int, grad: Any) -> None:
        push(parameter, layer, grad)
        most.append(len({entry.layer for entry in queue._waiting}))
        alive.append(weakref.ref(grad.x))

    alive: list[weakref.ref] = []
    queue.push = watched
    batch = random_batch(torch.randint(0, 8, (6, 2)), D, 0)
    x = batch.x_TD.requires_grad_()
    for experts, _ in layers:
        x = x + experts(x, batch.index_TK, batch.weights_TK)
    x.square().sum().backward()
    del x
    queue.flush()
    gc.collect()
    return {"most": max(most), "pushes": len(most), "alive": sum(ref() is not None for ref in alive)}


def make_big() -> Experts:
    torch.manual_seed(0)
    return Experts(D, I, 8, initializer_range=0.5)


def test_one_layers_rows_wait_at_most_and_nothing_stays() -> None:
    for rank in run_distributed(held_while_running, 2):
        assert rank == {"most": 1, "pushes": 8, "alive": 0}


def test_another_layers_gradient_computes_those_before() -> None:
    """Where no exchange comes between layers: their input needs no gradient."""
    queue, weights = make_queue("delayed"), [nn.Parameter(torch.randn(3, 3)) for _ in range(3)]
    for layer, weight in enumerate(weights):
        queue.push(weight, layer, _Product(torch.ones(2, 3), torch.ones(2, 3)))
        assert {entry.layer for entry in queue._waiting} == {layer}


# -- failing, and being read too early


def test_dropping_forgets_everything() -> None:
    experts, queue = make_experts(), make_queue("delayed")
    apply(experts, [3, 1, 0, 5], queue).backward()
    assert len(queue) == 2
    queue.drop()
    queue.assert_empty()
    flush(queue)
    assert experts.down_proj.grad is None
    apply(experts, [3, 1, 0, 5], queue).backward()
    flush(queue)
    once = make_experts()
    apply(once, [3, 1, 0, 5], None).backward()
    assert torch.equal(experts.down_proj.grad, once.down_proj.grad)


def test_a_leftover_is_an_error_that_names_the_layer() -> None:
    queue = make_queue("delayed")
    queue.push(nn.Parameter(torch.zeros(3, 3)), 7, _Product(torch.ones(2, 3), torch.ones(2, 3)))
    with pytest.raises(AssertionError, match=r"1 weight gradients are not in .grad yet \(waiting: layers \[7\]"):
        queue.assert_empty()


def test_a_buffer_takes_over_what_is_there() -> None:
    p = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    p.grad = torch.ones(3, dtype=torch.bfloat16)
    buffer = gradient_buffer(p)
    assert p.grad is buffer and buffer.dtype == torch.float32 and buffer.tolist() == [1, 1, 1]
    assert gradient_buffer(p) is buffer
    assert gradient_buffer(nn.Parameter(torch.zeros(2))).tolist() == [0, 0]
    assert deepcopy(p).dtype == torch.bfloat16
