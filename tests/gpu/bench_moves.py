"""The kernels that move tokens, on one GPU: same results as `permute.py`, time, bandwidth and host cost of each.

    PYTHONPATH=. python tests/gpu/bench_moves.py [--tokens 4096] [--hidden 2048] [--experts 128] [--slots 8]

Rank 0's view of an exchange between W ranks, all simulated here. `us` is the median of single calls between CUDA
events, the queue kept full, so that the host does not count; `host us` is what a call costs the host. GB/s counts each
byte that has to be read or written once. Exit code 1 if any result differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from lightning_ep.dispatch import kernels, permute
from lightning_ep.dispatch.permute import ROWS, Wire
from lightning_ep.experts import activation, activation_kernels
from tests.dispatch.exchange import dispatch

REPEATS = 30
# Long enough for the host to queue REPEATS calls meanwhile.
AHEAD_CYCLES = 20_000_000


@dataclass
class Case:
    name: str
    num_bytes: int
    call: Callable[[ModuleType], tuple[Tensor, ...]]
    buffers: tuple[Tensor, ...] = ()  # what it writes besides tensors of its own
    modules: tuple[ModuleType, ModuleType] = (kernels, permute)
    exact: bool = True


def cases(ep_size: int, tokens: int, hidden: int, experts: int, slots: int, width: int) -> Iterator[Case]:
    torch.manual_seed(0)
    wire = Wire(hidden, slots, torch.bfloat16)
    x = [torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(ep_size)]
    ids = [torch.rand(tokens, experts, device="cuda").topk(slots).indices for _ in range(ep_size)]
    weights = [torch.rand(tokens, slots, device="cuda") for _ in range(ep_size)]
    me = dispatch(permute, x, ids, weights, experts)[0]
    x_TD, ids_TK, weights_TK = x[0], ids[0], weights[0]
    S, R, P = len(me.sent), len(me.received), len(me.weights)
    row_bytes, slot_bytes = hidden * 2, tokens * slots * 4
    assert int(me.received_counts[:, ROWS].sum()) == R

    sent, received = me.sent, me.received
    rows_PD = torch.randn(P, hidden, device="cuda", dtype=torch.bfloat16)
    rows_SD, rows_RD = rows_PD.new_empty(S, hidden).normal_(), rows_PD.new_empty(R, hidden).normal_()
    grad_P = torch.randn(P, device="cuda")
    grad_sent = torch.zeros(S, wire.grad_row_bytes, dtype=torch.uint8, device="cuda")
    wire.tokens(grad_sent).copy_(rows_SD)
    wire.weights(grad_sent).normal_()
    out_TD, out_RD, out_PD = torch.empty_like(x_TD), torch.empty_like(rows_RD), torch.empty_like(rows_PD)
    grad_received = torch.zeros(R, wire.grad_row_bytes, dtype=torch.uint8, device="cuda")

    def resolve(moves: ModuleType) -> tuple[Tensor, ...]:
        tables = moves.resolve_rows(ids_TK, weights_TK, me.rank, me.counts, 0, experts, sent, wire)
        return *tables, sent

    def gather_grads(moves: ModuleType) -> tuple[Tensor, ...]:
        moves.gather_grads(rows_PD, grad_P, me.pos, grad_received, wire)
        return wire.tokens(grad_received), wire.weights(grad_received)

    def move(function: str, src: Tensor, pos: Tensor, out: Tensor) -> Callable[[ModuleType], tuple[Tensor, ...]]:
        return lambda moves: (getattr(moves, function)(src, pos, out),)

    local, received_weights, received_tokens = wire.experts(received), wire.weights(received), wire.tokens(received)
    at_tokens, at_experts = (tokens + S) * row_bytes, (R + P) * row_bytes
    yield Case("plan_rows", 3 * slot_bytes, lambda m: m.plan_rows(ids_TK, experts, ep_size))
    yield Case("resolve_rows", 6 * slot_bytes + 8 * S * slots, resolve, (sent,))
    yield Case("scatter_rows dispatch", at_tokens, move("scatter_rows", x_TD, me.first, wire.tokens(sent)), (sent,))
    yield Case(
        "index_rows",
        8 * R * slots + 8 * P,
        lambda m: m.index_rows(local, received_weights, me.received_counts, P, 0),
    )
    yield Case("scatter_rows to experts", at_experts, move("scatter_rows", received_tokens, me.pos, out_PD), (out_PD,))
    yield Case("gather_sum from experts", at_experts, move("gather_sum", rows_PD, me.pos, out_RD), (out_RD,))
    yield Case("gather_sum combine", at_tokens, move("gather_sum", rows_SD, me.first, out_TD), (out_TD,))
    yield Case("gather_grads", at_experts + 8 * R * slots, gather_grads, (grad_received,))
    yield Case("read_grads", at_tokens + 3 * slot_bytes, lambda m: m.read_grads(grad_sent, me.first, me.row, wire))
    h = torch.randn(P, 2 * width, device="cuda", dtype=torch.bfloat16)
    grad_PI = torch.randn(P, width, device="cuda", dtype=torch.bfloat16)
    both = activation_kernels, activation
    yield Case("swiglu forward", P * width * 6, lambda m: (m.forward(h, me.weights),), (), both, exact=False)
    yield Case("swiglu backward", P * width * 10, lambda m: m.backward(grad_PI, h, me.weights), (), both, exact=False)


def compare(case: Case) -> str:
    """'equal', the largest error of an inexact case, or what differs."""

    def call(moves: ModuleType) -> list[Tensor]:
        for buffer in case.buffers:
            buffer.view(torch.uint8).fill_(0xCD)
        return [tensor.clone() for tensor in case.call(moves)]

    # New tensors start with NaN and the largest integers: what a kernel leaves out shows.
    torch.use_deterministic_algorithms(True)
    mine, again = call(case.modules[0]), call(case.modules[0])
    torch.use_deterministic_algorithms(False)
    reference = call(case.modules[1])
    if not all(map(torch.equal, mine, again)):
        return "DIFFERS between two runs"
    if all(map(torch.equal, mine, reference)):
        return "equal"
    errors = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(mine, reference, strict=True)
    ]
    if case.exact or max(errors) > 1e-2:
        return f"DIFFERS by {max(errors):.1e}"
    return f"{max(errors):.0e}"


def measure(call: Callable[[], object]) -> SimpleNamespace:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    torch.cuda._sleep(AHEAD_CYCLES)
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    device = sorted(start.elapsed_time(end) * 1e3 for start, end in events)[REPEATS // 2]
    torch.cuda._sleep(AHEAD_CYCLES)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        call()
    host = (time.perf_counter() - begin) / REPEATS * 1e6
    torch.cuda.synchronize()
    return SimpleNamespace(device=device, host=host)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("hidden", 2048), ("experts", 128), ("slots", 8), ("width", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ep-sizes", type=int, nargs="+", default=[2, 4, 16])
    options = vars(parser.parse_args())
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", options)
    wrong = 0
    for ep_size in options.pop("ep_sizes"):
        print(
            f"\nW={ep_size:<3}{'':23}{'us':>8}{'GB/s':>8}{'host us':>9}   plain torch:{'us':>8}{'host us':>9}  result"
        )
        for case in cases(ep_size, **options):
            result = compare(case)
            wrong += "DIFFERS" in result
            fused, plain = (measure(lambda c=case, m=module: c.call(m)) for module in case.modules)
            print(
                f"{case.name:28}{fused.device:8.1f}{case.num_bytes / fused.device / 1e3:8.0f}{fused.host:9.1f}"
                f"{'':15}{plain.device:8.1f}{plain.host:9.1f}  {result}",
                flush=True,
            )
        torch.cuda.empty_cache()
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
