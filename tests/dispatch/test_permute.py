"""Properties of the moves in memory, over all routings that hypothesis thinks of."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ep.dispatch import permute
from lightning_ep.dispatch.permute import INVALID, ROWS, TOKENS, Wire, gather_slots, gather_sum, scatter_rows
from tests.dispatch.exchange import Rank, dispatch, exchange, exchange_back

WIDTH = 3
quick = settings(deadline=None, max_examples=60, derandomize=True)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Tensor, int]:
    """A position table and the number of rows that it names, each once."""
    rows, slots = draw(st.integers(0, 8)), draw(st.integers(1, 4))
    named = draw(st.permutations(range(rows * slots)))[: draw(st.integers(0, rows * slots))]
    pos = torch.full((rows * slots,), -1, dtype=torch.int32)
    pos[named] = torch.arange(len(named), dtype=torch.int32)
    return pos.view(rows, slots), len(named)


@st.composite
def routings(draw: st.DrawFn, invalid: bool = False) -> tuple[list[Tensor], int]:
    """Expert ids of every rank, and the number of experts. Ids may repeat within a token, ranks may be empty."""
    size, local, slots = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    num_experts = size * local
    ids = st.integers(-2, num_experts + 1) if invalid else st.integers(0, num_experts - 1)
    ranks = []
    for _ in range(size):
        tokens = draw(st.integers(0, 5))
        flat = draw(st.lists(ids, min_size=tokens * slots, max_size=tokens * slots))
        ranks.append(torch.tensor(flat, dtype=torch.int64).view(tokens, slots))
    return ranks, num_experts


@quick
@given(tables())
def test_scatter_then_gather_counts_places(table: tuple[Tensor, int]) -> None:
    pos, targets = table
    src = torch.randn(pos.shape[0], 3, dtype=torch.float64)
    there = scatter_rows(src, pos, torch.empty(targets, 3, dtype=torch.float64))
    back = gather_sum(there, pos, torch.empty_like(src))
    torch.testing.assert_close(back, src * (pos >= 0).sum(1, keepdim=True))


@quick
@given(tables())
def test_scatter_and_gather_are_adjoint(table: tuple[Tensor, int]) -> None:
    """<scatter(x), y> = <x, gather(y)>: the backward of a move is the other move."""
    pos, targets = table
    x, y = torch.randn(pos.shape[0], 3).double(), torch.randn(targets, 3).double()
    there, back = scatter_rows(x, pos, torch.empty_like(y)), gather_sum(y, pos, torch.empty_like(x))
    torch.testing.assert_close((there * y).sum(), (x * back).sum())


@quick
@given(tables())
def test_gather_slots_inverts_the_table(table: tuple[Tensor, int]) -> None:
    pos, targets = table
    values = torch.arange(1.0, targets + 1)
    out = gather_slots(values, pos, torch.empty(pos.shape))
    torch.testing.assert_close(out, (pos + 1).float())


@quick
@given(routings(invalid=True), st.data())
def test_plan_counts_and_numbers(routing: tuple[list[Tensor], int], data: st.DataObject) -> None:
    """Against counting by hand: an id outside the range is counted, and treated as the nearest."""
    ranks, num_experts = routing
    experts = data.draw(st.sampled_from(ranks))
    size = len(ranks)
    per_rank = num_experts // size
    rank, counts = permute.plan_rows(experts, num_experts, size)
    assert rank.dtype == counts.dtype == torch.int32 and counts.shape == (size, TOKENS + per_rank)
    rows, tokens, invalid = [0] * size, [0] * num_experts, 0
    for t, ids in enumerate(experts.tolist()):
        valid = [min(max(e, 0), num_experts - 1) for e in ids]
        invalid += sum(e != v for e, v in zip(ids, valid, strict=True))
        for e in valid:
            tokens[e] += 1
        destinations = [e // per_rank for e in valid]
        assert rank[t].tolist() == [rows[d] for d in destinations]
        for d in set(destinations):
            rows[d] += 1
    assert counts[:, ROWS].tolist() == rows
    assert counts[:, INVALID].tolist() == [invalid] * size
    assert counts[:, TOKENS:].flatten().tolist() == tokens


@quick
@given(routings(invalid=True))
def test_rows_carry_what_their_destination_needs(routing: tuple[list[Tensor], int]) -> None:
    """Rows are named once each and without gaps; a token's row holds its weights and its destination's experts."""
    experts, num_experts = routing
    ranks = _dispatch(experts, num_experts)
    size, per_rank = len(ranks), num_experts // len(ranks)
    for me, r in enumerate(ranks):
        named = r.first[r.first >= 0]
        assert sorted(named.tolist()) == list(range(r.sent.shape[0]))
        wire = Wire(WIDTH, r.experts.shape[1], torch.float64)
        begin = torch.cat([torch.zeros(1), torch.tensor([r.counts[w, ROWS] for w in _order(me, size)]).cumsum(0)])
        for (t, k), row in _entries(r.row):
            valid = r.experts[t].clamp(0, num_experts - 1)
            place = _order(me, size).index(int(valid[k]) // per_rank)
            assert begin[place] <= row < begin[place + 1]
            here = valid // per_rank == valid[k] // per_rank
            assert wire.experts(r.sent)[row].tolist() == torch.where(here, valid % per_rank, -1).tolist()
            assert wire.weights(r.sent)[row].tolist() == _weights(r.experts)[t].tolist()
            assert r.first[t, k] == (row if (r.row[t, :k] != row).all() else -1)


@quick
@given(routings())
def test_pairs_are_sorted_by_expert_in_the_order_received(routing: tuple[list[Tensor], int]) -> None:
    experts, num_experts = routing
    for r in _dispatch(experts, num_experts):
        wire = Wire(WIDTH, r.experts.shape[1], torch.float64)
        local = wire.experts(r.received)
        expected = sorted((int(e), row, k) for (row, k), e in _entries(local) if e >= 0)
        places = {(row, k): int(p) for (row, k), p in _entries(r.pos)}
        assert [places.pop((row, k)) for _, row, k in expected] == list(range(len(expected)))
        assert set(places.values()) <= {-1}
        assert r.weights.tolist() == [wire.weights(r.received)[row, k].item() for _, row, k in expected]
        ends = [sum(e <= expert for e, _, _ in expected) for expert in range(num_experts // len(experts))]
        assert r.offsets.tolist() == ends


@quick
@given(routings(), st.booleans())
def test_the_whole_journey_sums_weighted_experts(routing: tuple[list[Tensor], int], dedup: bool) -> None:
    """Dispatch, experts, combine and their backward, with every rank in this process."""
    experts, num_experts = routing
    per_rank, slots = num_experts // len(experts), experts[0].shape[1]
    torch.manual_seed(0)
    tokens = [torch.randn(ids.shape[0], WIDTH, dtype=torch.float64) for ids in experts]
    weights = [_weights(ids) for ids in experts]
    matrices = torch.randn(num_experts, WIDTH, WIDTH, dtype=torch.float64)

    sent_ids, sent_weights = experts, weights
    if not dedup:
        sent_ids, sent_weights = ([x.reshape(-1, 1) for x in xs] for xs in (experts, weights))
        ranks = dispatch(permute, [x.repeat_interleave(slots, 0) for x in tokens], sent_ids, sent_weights, num_experts)
    else:
        ranks = dispatch(permute, tokens, sent_ids, sent_weights, num_experts)
    rows_WW = torch.stack([r.counts[:, ROWS] for r in ranks])
    wire = Wire(WIDTH, sent_ids[0].shape[1], torch.float64)

    # Forward: y = w * M x for each pair. Backward for the loss sum(out * grad): dx = w * M^T dy, dw = <M x, dy>.
    grads = [torch.randn_like(x) for x in tokens]
    firsts = [r.first.view(-1, slots) for r in ranks]
    partial, grad_partial = [], []
    grad_received = _exchange_like_dispatch(ranks, grads, firsts, rows_WW)
    for me, r in enumerate(ranks):
        pairs = len(r.weights)
        expert_P = torch.bucketize(torch.arange(pairs), r.offsets, right=True) + me * per_rank
        x_PD = scatter_rows(wire.tokens(r.received), r.pos, torch.empty(pairs, WIDTH, dtype=torch.float64))
        plain = torch.einsum("pij,pj->pi", matrices[expert_P], x_PD)
        out = torch.empty(len(r.received), WIDTH, dtype=torch.float64)
        partial.append(gather_sum(plain * r.weights[:, None], r.pos, out))
        dy_PD = scatter_rows(grad_received[me], r.pos, torch.empty_like(x_PD))
        dx_PD = torch.einsum("pij,pi->pj", matrices[expert_P], dy_PD) * r.weights[:, None]
        grad_partial.append(torch.empty(len(r.received), wire.grad_row_bytes, dtype=torch.uint8))
        permute.gather_grads(dx_PD, (plain * dy_PD).sum(1), r.pos, grad_partial[-1], wire)

    returned, grad_returned = exchange_back(partial, rows_WW), exchange_back(grad_partial, rows_WW)
    for me, r in enumerate(ranks):
        out = gather_sum(returned[me], firsts[me], torch.empty_like(tokens[me]))
        plain_TKD = torch.einsum("tkij,tj->tki", matrices[experts[me]], tokens[me])
        torch.testing.assert_close(out, (plain_TKD * weights[me][:, :, None]).sum(1))
        grad_tokens, grad_weights = permute.read_grads(grad_returned[me], firsts[me], r.row, wire)
        expected = torch.einsum("tkij,ti,tk->tj", matrices[experts[me]], grads[me], weights[me])
        torch.testing.assert_close(grad_tokens, expected)
        torch.testing.assert_close(grad_weights, torch.einsum("tki,ti->tk", plain_TKD, grads[me]))


@quick
@given(routings())
def test_a_token_travels_once_to_a_rank(routing: tuple[list[Tensor], int]) -> None:
    experts, num_experts = routing
    per_rank = num_experts // len(experts)
    for r in _dispatch(experts, num_experts):
        assert r.sent.shape[0] == sum(len({e // per_rank for e in ids}) for ids in r.experts.tolist())


def _weights(experts: Tensor) -> Tensor:
    """Distinct weights, the same whenever they are asked for."""
    return torch.linspace(0.1, 0.9, experts.numel(), dtype=torch.float64).view(experts.shape)


def _dispatch(experts: list[Tensor], num_experts: int) -> list[Rank]:
    tokens = [torch.randn(ids.shape[0], WIDTH, dtype=torch.float64) for ids in experts]
    return dispatch(permute, tokens, experts, [_weights(ids) for ids in experts], num_experts)


def _order(me: int, size: int) -> list[int]:
    return [*(rank for rank in range(size) if rank != me), me]


def _entries(table: Tensor):
    return (((t, k), value) for t, values in enumerate(table.tolist()) for k, value in enumerate(values))


def _exchange_like_dispatch(
    ranks: list[Rank], tokens: list[Tensor], firsts: list[Tensor], rows_WW: Tensor
) -> list[Tensor]:
    sent = [
        scatter_rows(x, first, torch.empty(len(r.sent), WIDTH, dtype=x.dtype))
        for r, x, first in zip(ranks, tokens, firsts, strict=True)
    ]
    return exchange(sent, rows_WW)
