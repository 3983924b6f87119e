"""The Triton kernels against `permute.py`, in Triton's interpreter (tests/conftest.py turns it on)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ep.dispatch import kernels, permute
from lightning_ep.dispatch.alltoall import AllToAllDispatcher, GroupTransport
from lightning_ep.dispatch.base import combine
from lightning_ep.dispatch.base import dispatch as send
from lightning_ep.dispatch.permute import Wire
from tests.dispatch.exchange import dispatch
from tests.distributed import run_distributed

E = 8


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """`torch.empty` holds NaN and the largest integers: whatever a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _equal(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def _random(tokens: int, slots: int) -> Tensor:
    scores = torch.rand(tokens, E)
    return scores.topk(slots).indices


ROUTINGS = {
    "random": _random,
    "one expert": lambda tokens, slots: torch.full((tokens, slots), 5),
    "last expert": lambda tokens, slots: torch.full((tokens, slots), E - 1),
    "duplicates": lambda tokens, slots: torch.randint(0, 2, (tokens, slots)) * 5,
    "a rank without tokens": lambda tokens, slots: torch.randint(2, E // 2, (tokens, slots)),
    "invalid ids": lambda tokens, slots: torch.randint(-3, E + 3, (tokens, slots)),
    "huge ids": lambda tokens, slots: torch.randint(0, E, (tokens, slots)) + (torch.rand(tokens, slots) < 0.2) * 2**40,
}


@pytest.mark.parametrize("ep_size, slots, block", [(1, 3, 16), (2, 8, 16), (4, 1, 4096), (8, 2, 64)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_plan_resolve_index(routing: str, ep_size: int, slots: int, block: int, monkeypatch) -> None:
    """Every table and every byte of the buffers, on all ranks, in one block and in many; rank 1 has no tokens."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "_SLOTS", block)
    lengths = [0 if rank == 1 else 7 - rank % 3 for rank in range(ep_size)]
    tokens = [torch.randn(n, 12) for n in lengths]
    experts = [ROUTINGS[routing](n, slots) for n in lengths]
    weights = [torch.rand(n, slots) for n in lengths]
    for mine, reference in zip(
        dispatch(kernels, tokens, experts, weights, E), dispatch(permute, tokens, experts, weights, E), strict=True
    ):
        for field in dataclasses.fields(mine):
            _equal(getattr(mine, field.name), getattr(reference, field.name))


@pytest.mark.parametrize(
    "dtype, weight_dtype",
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float16), (torch.float64, torch.float64)],
)
def test_wire_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Weights of any dtype travel in the wire's; a hidden size that ends within 16 bytes is padded."""
    torch.manual_seed(0)
    tokens = [torch.randn(6, 5).to(dtype) for _ in range(2)]
    experts = [_random(6, 3) for _ in range(2)]
    weights = [torch.rand(6, 3).to(weight_dtype) for _ in range(2)]
    for mine, reference in zip(
        dispatch(kernels, tokens, experts, weights, E), dispatch(permute, tokens, experts, weights, E), strict=True
    ):
        _equal(mine.sent, reference.sent)
        _equal(mine.weights, reference.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [0, 5, 700])
def test_weights_that_are_not_finite_name_no_expert(tokens: int, dtype: torch.dtype) -> None:
    weights = torch.rand(tokens, 3).to(dtype)
    for value in (float("nan"), float("inf"), -float("inf"), 0.0):
        weights[torch.rand(tokens, 3) < 0.2] = value
    experts = torch.randint(0, E, (tokens, 3))
    mine, reference = (moves.without_nonfinite(experts, weights) for moves in (kernels, permute))
    _equal(mine, reference)
    assert torch.equal(mine == permute.NO_EXPERT, ~weights.isfinite())


def _places(rows: int, slots: int, targets: int) -> Tensor:
    """A table that names each of `targets` rows once, -1 in the other slots."""
    flat = torch.full((rows * slots,), -1, dtype=torch.int32)
    flat[torch.randperm(rows * slots)[:targets]] = torch.randperm(targets, dtype=torch.int32)
    return flat.view(rows, slots)


def _integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values whose sums bfloat16 holds exactly: the interpreter cuts off where a GPU rounds to the nearest."""
    return torch.randint(-8, 9, shape).to(dtype)


SHAPES = [(7, 3, 13, 20), (5, 1, 5, 32), (4, 8, 0, 3), (0, 2, 0, 4), (1, 2, 1, 1), (3, 5, 15, 1500)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, slots, targets, width", SHAPES)
def test_moves(rows: int, slots: int, targets: int, width: int, dtype: torch.dtype, strided: bool) -> None:
    torch.manual_seed(0)
    pos = _places(rows, slots, targets)
    pitch = width + 16 if strided else width
    few, many = _integers(rows, pitch, dtype=dtype), _integers(targets, pitch, dtype=dtype)
    few_f32, many_f32 = few[:, :width], many[:, :width]
    for source, function, shape in ((few_f32, "scatter_rows", many), (many_f32, "gather_sum", few)):
        outs = [torch.full_like(shape, -77) for _ in range(2)]
        for out, moves in zip(outs, (kernels, permute), strict=True):
            view = out[:, :width]
            assert getattr(moves, function)(source, pos, view) is view
        _equal(*outs)


def test_sums_are_float32_in_slot_order() -> None:
    """Bit for bit: 1e8 + 1 - 1e8 is 0 in this order and 1 in another; columns of a transposed source too."""
    src = torch.tensor([[1e8], [1.0], [-1e8]]).repeat(1, 4)
    pos = torch.tensor([[0, 1, 2], [0, 2, 1], [2, -1, 0]], dtype=torch.int32)
    out = kernels.gather_sum(src, pos, torch.empty(3, 4))
    assert out[:, 0].tolist() == [0.0, 1.0, 0.0]
    torch.manual_seed(0)
    src = torch.randn(40, 30).t()
    pos = torch.randint(-1, 30, (11, 6), dtype=torch.int32)
    _equal(kernels.gather_sum(src, pos, torch.empty(11, 40)), permute.gather_sum(src, pos, torch.empty(11, 40)))


def test_unnamed_values_never_leak() -> None:
    """A row that no position names may hold anything, NaN included."""
    src = torch.full((3, 8), torch.nan)
    src[1] = 2
    pos = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int32)
    assert kernels.gather_sum(src, pos, torch.empty(2, 8)).sum(1).tolist() == [16.0, 0.0]


@pytest.mark.parametrize("rows, slots, targets", [(7, 3, 13), (4, 8, 0), (0, 2, 0), (600, 2, 900)])
def test_slots(rows: int, slots: int, targets: int) -> None:
    torch.manual_seed(0)
    pos = _places(rows, slots, targets)
    outs = [torch.full((rows, slots + 4), -77.0) for _ in range(2)]
    for out, moves in zip(outs, (kernels, permute), strict=True):
        moves.gather_slots(torch.arange(1.0, targets + 1), pos, out[:, :slots])
    _equal(*outs)
    carriers = max(targets, 1)
    row = torch.randint(0, carriers, (rows, slots), dtype=torch.int32)
    src = torch.randn(carriers, slots + 4)[:, :slots]
    _equal(kernels.read_slots(src, row), permute.read_slots(src, row))
    nothing = torch.empty(0, slots)
    _equal(kernels.read_slots(nothing, row), permute.read_slots(nothing, row))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("rows, slots, targets, width", SHAPES)
def test_gradients(rows: int, slots: int, targets: int, width: int, dedup: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wire = Wire(width, slots if dedup else 1, dtype)
    pos = _places(rows, slots, targets)
    pos_rows = pos if dedup else pos.view(-1, 1)
    grad_rows = _integers(targets, width, dtype=dtype)
    grad_weights = torch.rand(targets, 1).to(wire.weight_dtype).expand(targets, 2)[:, 0]
    filled = []
    for moves in (kernels, permute):
        filled.append(torch.full((pos_rows.shape[0], wire.grad_row_bytes), 0xAB, dtype=torch.uint8))
        moves.gather_grads(grad_rows, grad_weights, pos_rows, filled[-1], wire)
    for view in (wire.tokens, wire.weights):
        _equal(*map(view, filled))

    if targets:
        sent = torch.full((targets, wire.grad_row_bytes), 0xAB, dtype=torch.uint8)
        wire.tokens(sent).copy_(grad_rows)
        wire.weights(sent).copy_(torch.rand(targets, wire.slots))
        row = torch.randint(0, targets, (rows, slots), dtype=torch.int32).view(-1, wire.slots)
        for mine, reference in zip(*(m.read_grads(sent, pos, row, wire) for m in (kernels, permute)), strict=True):
            _equal(mine, reference)


@pytest.mark.parametrize("dedup", [True, False])
def test_dispatcher_does_the_same_with_kernels(dedup: bool) -> None:
    """Outputs and gradients on two ranks, bit for bit."""
    for plain, fused in run_distributed(_journeys, 2, dedup):
        for reference, mine in zip(plain, fused, strict=True):
            _equal(mine, reference)


def _journeys(dedup: bool) -> list[list[Tensor]]:
    results = []
    for fused in (False, True):
        torch.manual_seed(dist.get_rank())
        x, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 3, requires_grad=True)
        dispatcher = AllToAllDispatcher(4, GroupTransport(dist.group.WORLD), layer=0, dedup=dedup, fused=fused)
        exchange = dispatcher.route(torch.rand(5, 4).topk(3).indices)
        rows = send(exchange, x, weights)
        out = combine(exchange, rows.rows_PD.sin() * rows.weights_P[:, None])
        out.cos().sum().backward()
        results.append([out.detach(), x.grad, weights.grad])
    return results
