"""All ranks of an exchange in one process: their buffers are cut and joined by hand."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from lightning_ep.dispatch.permute import ROWS, TOKENS, Wire


@dataclass
class Rank:
    """What one rank knows once its tokens have left (`row`, `first`) and its experts have theirs (`pos`, ...)."""

    experts: Tensor
    rank: Tensor
    counts: Tensor
    row: Tensor
    first: Tensor
    sent: Tensor
    received: Tensor
    received_counts: Tensor
    pos: Tensor
    weights: Tensor
    offsets: Tensor


def dispatch(
    moves: ModuleType, tokens: list[Tensor], experts: list[Tensor], weights: list[Tensor], num_experts: int
) -> list[Rank]:
    """Plan, resolve, fill, exchange and index on every rank with the functions of `moves`."""
    size = len(tokens)
    wire = Wire(tokens[0].shape[1], experts[0].shape[1], tokens[0].dtype)
    plans = [moves.plan_rows(ids, num_experts, size) for ids in experts]
    counts = torch.stack([counts for _, counts in plans])
    ranks = []
    for me, (rank, sent_counts) in enumerate(plans):
        # 0xAB: what nobody writes must be the same in two runs that are compared
        shape = int(sent_counts[:, ROWS].sum()), wire.row_bytes
        sent = torch.full(shape, 0xAB, dtype=torch.uint8, device=experts[me].device)
        row, first = moves.resolve_rows(experts[me], weights[me], rank, sent_counts, me, num_experts, sent, wire)
        moves.scatter_rows(tokens[me], first, wire.tokens(sent))
        ranks.append(Rank(experts[me], rank, sent_counts, row, first, sent, *[torch.empty(0)] * 5))
    received = exchange([r.sent for r in ranks], counts[:, :, ROWS])
    for me, r in enumerate(ranks):
        r.received, r.received_counts = received[me], counts[:, me].contiguous()
        pairs = int(r.received_counts[:, TOKENS:].sum())
        r.pos, r.weights, r.offsets = moves.index_rows(
            wire.experts(r.received), wire.weights(r.received), r.received_counts, pairs, me
        )
    return ranks


def exchange(buffers: list[Tensor], rows_WW: Tensor) -> list[Tensor]:
    """Send buffers (others' rows by rank, own last) to receive buffers (own first, others' by rank).

    `rows_WW[i, j]`: rows from rank i to rank j.
    """
    size = len(buffers)
    parts: dict[tuple[int, int], Tensor] = {}
    for source, buffer in enumerate(buffers):
        order = [rank for rank in range(size) if rank != source] + [source]
        for target, part in zip(order, buffer.split(rows_WW[source, order].tolist()), strict=True):
            parts[source, target] = part
    return [
        torch.cat([parts[source, me] for source in [me, *(r for r in range(size) if r != me)]]) for me in range(size)
    ]


def exchange_back(buffers: list[Tensor], rows_WW: Tensor) -> list[Tensor]:
    """The way back: buffers laid out as received become buffers laid out as sent."""
    size = len(buffers)
    parts: dict[tuple[int, int], Tensor] = {}
    for me, buffer in enumerate(buffers):
        order = [me, *(rank for rank in range(size) if rank != me)]
        for source, part in zip(order, buffer.split(rows_WW[order, me].tolist()), strict=True):
            parts[source, me] = part
    return [
        torch.cat([parts[source, target] for target in [*(r for r in range(size) if r != source), source]])
        for source in range(size)
    ]
