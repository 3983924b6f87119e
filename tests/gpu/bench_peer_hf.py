"""Forward and backward of Qwen3-30B-A3B layers, ours beside transformers' own expert parallelism, in one run.

on_one_gpu 2 tests/gpu/bench_peer_hf.py      (L layers, S tokens a rank by environment)
"""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist

from lightning_ep.bench.shapes import qwen3_30b_a3b
from lightning_ep.dense import fuse_rms_norms
from lightning_ep.dispatch.alltoall import GroupTransport
from tests.gpu.common import DEVICE, RANK, WORLD, kernel_times, parallelize, profiled, say, start, time_ms

L, S = int(os.environ.get("L", 4)), int(os.environ.get("S", 4096))


FUSED_NORMS = bool(int(os.environ.get("FUSED_NORMS", 0)))  # in all cases, the peer's too


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    with DEVICE:
        model = qwen3_30b_a3b(L).train()
    if FUSED_NORMS:
        assert fuse_rms_norms(model) == 4 * L + 1
    return model


def peer() -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    model = build()
    mesh = init_device_mesh("cuda", (1, WORLD), mesh_dim_names=("tp", "ep"))
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation="all_to_all")
    return model


def ours(**options: object) -> torch.nn.Module:
    model = build()
    parallelize(model, WORLD, CountingTransport, **options)
    return model


SENT = {"bytes": 0}


class CountingTransport(GroupTransport):
    """Adds up the bytes that leave this rank; its own rows never enter an all-to-all."""

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, *splits: list[int]) -> dist.Work:
        SENT["bytes"] += inp.nbytes
        return super().all_to_all(out, inp, *splits)


def measure_all(cases: dict, rounds: int = 2) -> None:
    torch.manual_seed(1 + RANK)
    ids = torch.randint(0, 1024, (1, S), device=DEVICE)
    best: dict[str, list[float]] = {name: [] for name in cases}
    notes: dict[str, str] = {}
    for round_ in range(rounds):
        for name, make in cases.items():
            model = make()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

            def step(model=model) -> None:
                for p in model.parameters():
                    p.grad = None
                model(input_ids=ids, labels=ids).loss.backward()

            for _ in range(3):
                step()
            best[name].append(time_ms(step))
            SENT["bytes"] = 0
            step()
            # The peer sends every choice of an expert, own ones too: 8 copies, there and back, forward and backward.
            sent = SENT["bytes"] / S / L or 8 * 2048 * 2 * 4
            peak = torch.cuda.max_memory_allocated() / 2**30
            if round_ == 0:
                kinds = kernel_times(profiled(step))
                if RANK == 0 and (folder := os.environ.get("TRACES")) and name in ("ours", "peer HF"):
                    kinds_ = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
                    with torch.profiler.profile(activities=kinds_) as both:
                        step()
                        torch.cuda.synchronize()
                    both.export_chrome_trace(f"{folder}/{name.replace(' ', '_')}.json.gz")
                elif name in ("ours", "peer HF") and os.environ.get("TRACES"):
                    step()
                notes[name] = f"peak {peak:5.1f} GiB  {sent:,.0f} bytes a token and layer in all-to-alls  " + "  ".join(
                    f"{k} {v:.1f}" for k, v in sorted(kinds.items())
                )
            del model, step
            gc.collect()  # a replaced forward is a cycle
            torch.cuda.empty_cache()
    for name, times in best.items():
        tokens_s = S * 1e3 / min(times)
        say(f"world {WORLD} L {L} S {S} fused norms {FUSED_NORMS} {name:16s} {min(times):7.1f} ms (rounds {[round(t, 1) for t in times]})"
            f"  {tokens_s:,.0f} tokens/s a rank  {notes[name]}")  # fmt: skip
    peer_ms = min(best["peer HF"])
    for name, times in best.items():
        say(f"  {name}: {peer_ms / min(times):.2f}x of the peer")


if __name__ == "__main__":
    start()
    torch.set_default_dtype(torch.bfloat16)
    every = {
        "peer HF": peer,
        "ours": lambda: ours(),
        "ours no dedup": lambda: ours(moe_dispatch_dedup=False),
        "ours unfused": lambda: ours(moe_permute_fusion=False),
    }
    wanted = os.environ.get("CASES")
    measure_all({name: make for name, make in every.items() if not wanted or name in wanted.split(",")})
    dist.destroy_process_group()
