"""Bytes and time of dispatch + combine, forward and backward, of every dispatcher on one shape, without experts; and
DeepEP and HybridEP called directly on the same tensors.

on_one_gpu 2 tests/gpu/bench_dispatchers.py [alltoall | deepep | hybridep ...]     (T tokens, D, E, K, ROUNDS by environment)

Direct calls move rows in memory too where the dispatcher has to (`+ moves`): what our protocol costs is the rest.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ep.config import EPConfig
from lightning_ep.dispatch import Carrier, make_carrier, make_dispatcher
from lightning_ep.dispatch.alltoall import GroupTransport
from lightning_ep.dispatch.base import combine, dispatch
from lightning_ep.experts.parallel import balanced_routing
from lightning_ep.libraries import LibraryError
from lightning_ep.mesh import build_mesh
from tests.dispatch.conformance import OPTIONS
from tests.gpu.common import DEVICE, RANK, WORLD, say, start

T, D, E, K = (int(os.environ.get(k, d)) for k, d in (("T", 4096), ("D", 2048), ("E", 128), ("K", 8)))
ROUNDS, REPEATS, WARM = int(os.environ.get("ROUNDS", 5)), 6, 3


@dataclass
class Variant:
    """Something to time: `forward()` returns what `backward()` takes. Several take turns, so that all see the same
    machine."""

    name: str
    forward: Callable[[], object]
    backward: Callable[[object], object]
    megabytes: float
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)

    def once(self) -> tuple[float, float]:
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        state = self.forward()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        self.backward(state)
        torch.cuda.synchronize()
        return (middle - began) * 1e3, (time.perf_counter() - middle) * 1e3

    @property
    def total_ms(self) -> float:
        return median(f + b for f, b in zip(self.forward_ms, self.backward_ms, strict=True))


class Inputs:
    """Tokens with a balanced routing, the same for every variant."""

    def __init__(self) -> None:
        torch.manual_seed(RANK)
        self.x = torch.randn(T, D, device=DEVICE, dtype=torch.bfloat16)
        self.grad = torch.randn_like(self.x)
        self.ids = balanced_routing(T * WORLD, K, E)[RANK * T : (RANK + 1) * T].to(DEVICE)
        self.weights = torch.rand(T, K, device=DEVICE)
        # Copies of tokens that leave the rank: one a destination, or one an expert.
        rank = self.ids // (E // WORLD)
        away = rank != RANK
        self.rows_away = sum(int((rank == r).any(1).sum()) for r in range(WORLD) if r != RANK)
        self.pairs_away = int(away.sum())


def ours(name: str, carrier: Carrier, inputs: Inputs, megabytes: float, label: str = "", **options: object) -> Variant:
    """A dispatcher through the protocol and autograd; the experts give back what they get."""
    config = EPConfig(expert_model_parallel_size=WORLD, **OPTIONS[name], **options)
    dispatcher = make_dispatcher(config, E, carrier, 0, lambda: None)
    x, weights = inputs.x.clone().requires_grad_(), inputs.weights.clone().requires_grad_()

    def forward() -> Tensor:
        exchange = dispatcher.route(inputs.ids)
        rows = dispatch(exchange, x, weights)
        return combine(exchange, rows.rows_PD)

    def backward(out: Tensor) -> None:
        x.grad = weights.grad = None
        out.backward(inputs.grad)

    out = forward()
    backward(out)
    for what, got, want in (("output", out, inputs.x), ("gradient", x.grad, inputs.grad)):
        error = ((got - K * want).abs().max() / (K * want).abs().max()).item()
        assert error < 2e-2, f"{name}: {what} is off by {error:.1e}"
    return Variant(label or name, forward, backward, megabytes)


def deepep_directly(carrier: Carrier, inputs: Inputs, megabytes: float, with_moves: bool) -> Variant:
    """`deep_ep.Buffer` as its own tests call it; every call waits for the one before on the current stream."""
    from lightning_ep.dispatch import kernels as moves

    buffer, x, grad = carrier.buffer._buffer, inputs.x, inputs.grad
    assert buffer is not None, "the dispatcher runs first, and makes the buffer"

    def forward() -> tuple:
        per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.ids, E)
        rows, local, weights, counts, handle, _ = buffer.dispatch(
            x, topk_idx=inputs.ids, topk_weights=inputs.weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        )  # fmt: skip
        pos = weights_P = None
        if with_moves:
            table = torch.tensor([[len(rows), 0, *counts]], dtype=torch.int32, pin_memory=True).to(
                DEVICE, non_blocking=True
            )
            pos, weights_P, _ = moves.index_rows(local, weights, table, sum(counts), 0)
            rows_PD = moves.scatter_rows(rows, pos, rows.new_empty(sum(counts), D))
            rows = moves.gather_sum(rows_PD, pos, torch.empty_like(rows))
        buffer.combine(rows, handle)
        return handle, pos, weights_P, weights

    def backward(state: tuple) -> None:
        handle, pos, weights_P, weights = state
        rows = buffer.dispatch(grad, handle=handle)[0]
        if with_moves:
            grad_PD = moves.scatter_rows(rows, pos, rows.new_empty(len(weights_P), D))
            rows = moves.gather_sum(grad_PD, pos, torch.empty_like(rows))
            weights = moves.gather_slots(torch.zeros_like(weights_P), pos, torch.empty_like(weights))
        buffer.combine(rows, handle, topk_weights=weights)

    return Variant(f"  library alone{' + moves' if with_moves else ''}", forward, backward, megabytes)


def hybridep_directly(carrier: Carrier, inputs: Inputs, megabytes: float) -> Variant:
    """`HybridEPBuffer` as its own tests call it: ids and weights in, sizes read from the GPU."""
    buffer = carrier.buffer(D, T, E // WORLD)

    def forward() -> tuple:
        rows, weights, _, _, handle = buffer.dispatch_with_permute(
            hidden=inputs.x, topk_idx=inputs.ids, topk_weights=inputs.weights, num_of_experts=E,
            num_of_experts_per_rank=E // WORLD, pad_multiple=1,
        )  # fmt: skip
        buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=1)
        return handle, weights

    def backward(state: tuple) -> None:
        handle, weights = state
        rows = buffer.dispatch_with_permute(
            hidden=inputs.grad, handle=handle, pad_multiple=1, num_permuted_tokens=len(weights)
        )[0]
        buffer.combine_with_unpermute(hidden=rows, probs=weights, handle=handle, pad_multiple=1)

    return Variant("  library alone", forward, backward, megabytes)


def variants(name: str, carrier: Carrier, inputs: Inputs) -> list[Variant]:
    """The dispatcher and what it is compared with. Megabytes: what one rank sends to others, forward and backward."""
    row, rows = 2 * D, inputs.rows_away
    if name == "alltoall":
        dedup = rows * (4 * row + 2 * (8 * K))  # tokens four times; weights and ids, weights' gradients
        single = inputs.pairs_away * (4 * row + 2 * 16)
        return [
            ours("alltoall", carrier, inputs, dedup / 1e6),
            ours("alltoall without dedup", carrier, inputs, single / 1e6),
            ours("alltoall", carrier, inputs, dedup / 1e6, "alltoall, plain torch", moe_permute_fusion=False),
        ]
    if name == "deepep":
        size = rows * (4 * row + 12 * K + 4 * K) / 1e6
        return [
            ours(name, carrier, inputs, size),
            deepep_directly(carrier, inputs, size, with_moves=True),
            deepep_directly(carrier, inputs, size, with_moves=False),
        ]
    size = (rows * (4 * row + 2 * 4 * E) + (WORLD - 1) * T * E) / 1e6  # weights of all experts; everyone's routing
    return [ours(name, carrier, inputs, size), hybridep_directly(carrier, inputs, size)]


def measure(these: list[Variant]) -> None:
    for variant in these:
        for _ in range(WARM):
            variant.once()
    for _ in range(ROUNDS):
        for variant in these:
            times = [variant.once() for _ in range(REPEATS)]
            variant.forward_ms += [f for f, _ in times]
            variant.backward_ms += [b for _, b in times]


def table(these: list[Variant]) -> str:
    lines = []
    for v in these:
        ratio = f"{these[0].total_ms / v.total_ms - 1:+.1%}" if v is not these[0] else ""
        lines.append(
            f"{v.name:26s} {v.megabytes:8.1f} MB  forward {median(v.forward_ms):6.3f} ms  backward "
            f"{median(v.backward_ms):6.3f} ms  both {v.total_ms:6.3f} ms {ratio:>8s}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["alltoall", "deepep", "hybridep"]
    start()
    inputs, tables, failed = Inputs(), [], False
    for name in wanted:
        mesh = build_mesh(WORLD, "cuda", timedelta(seconds=60))
        try:
            config = EPConfig(expert_model_parallel_size=WORLD, **OPTIONS[name])
            carrier = make_carrier(config, mesh)
            these = variants(name, carrier, inputs)
            measure(these)
            tables.append(table(these))
            if not isinstance(carrier, GroupTransport):
                carrier.close()
        except LibraryError as error:
            tables.append(f"{name}: not run: {error}")
        except Exception:
            print(f"rank {RANK}, {name}:\n{traceback.format_exc()}", flush=True)
            tables.append(f"{name}: FAILED (traceback above)")
            failed = True
        mesh.destroy()
    say(
        f"\ndispatch + combine, {WORLD} ranks, {T} tokens x {D}, {E} experts, top-{K}, bfloat16, one GPU a rank: "
        f"{'no, shared' if os.environ.get('LIGHTNING_EP_ONE_GPU') else 'yes'}; medians of {ROUNDS * REPEATS}, in turns; "
        "MB: what a rank sends to others; the last column: the first line against this one"
    )
    say("\n".join(tables))
    dist.destroy_process_group()
    sys.exit(failed)
