"""50 steps of a tiny Qwen3-MoE under the Trainer with each dispatcher, in bfloat16: losses against alltoall's, and no
overlap against 1f1b, bit for bit.

on_one_gpu 2 tests/gpu/train_dispatchers.py [alltoall | deepep | hybridep ...]      (STEPS by environment)
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's own condition for determinism

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy
from lightning_ep.libraries import LibraryError
from tests.dispatch.conformance import OPTIONS
from tests.gpu.common import DEVICE, DEVICES, RANK, WORLD, say, start

STEPS, ACCUMULATE, BATCH, LENGTH, VOCAB = int(os.environ.get("STEPS", 50)), 2, 4, 128, 512
# Rounding moves a few tokens to other experts, and 50 steps let that grow. Largest difference of one step's loss (mean
# over ranks and micro-batches), and of the mean over the last ten.
STEP_TOLERANCE, END_TOLERANCE = 0.15, 0.05


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, norm_topk_prob=True,
            output_router_logits=True, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)


def batches() -> list[Tensor]:
    """Sequences that count up in steps of their own, which a model learns in tens of steps."""
    generator = torch.Generator().manual_seed(1 + RANK)
    shape = (STEPS * ACCUMULATE, BATCH, 1)
    start, stride = torch.randint(VOCAB, shape, generator=generator), torch.randint(1, 8, shape, generator=generator)
    return list((start + stride * torch.arange(LENGTH)) % VOCAB)


def train(dispatcher: str, overlap: bool) -> tuple[Tensor, Tensor, float]:
    """Losses of this rank's micro-batches, all its parameters, and seconds a step."""
    module = Module()
    strategy = EPOverlapStrategy(WORLD, overlap_moe_expert_parallel_comm=overlap, **OPTIONS[dispatcher])
    trainer = pl.Trainer(
        **DEVICES, strategy=strategy, precision="bf16-true", max_epochs=1, accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    began = time.perf_counter()
    trainer.fit(module, DataLoader(batches(), batch_size=None))
    seconds = (time.perf_counter() - began) / STEPS
    return (
        torch.stack(module.losses).cpu(),
        torch.cat([p.detach().flatten().cpu() for p in module.parameters()]),
        seconds,
    )


def by_step(losses: Tensor) -> Tensor:
    """`[STEPS]`: the mean over the micro-batches and the ranks."""
    mean = losses.float().view(STEPS, ACCUMULATE).mean(1).to(DEVICE)
    dist.all_reduce(mean)
    return mean.cpu() / WORLD


def on_every_rank(fine: bool) -> bool:
    flag = torch.tensor(int(fine), device=DEVICE)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    wanted = sys.argv[1:] or ["alltoall", "deepep", "hybridep"]
    wanted = ["alltoall", *(name for name in wanted if name != "alltoall")]
    start()
    torch.use_deterministic_algorithms(True)
    rows, failed, base = [], False, None
    for name in wanted:
        try:
            losses, parameters, plain_s = train(name, overlap=False)
            again, parameters_1f1b, overlap_s = train(name, overlap=True)
        except LibraryError as error:
            rows.append(f"{name:9s} not run: {error}")
            continue
        except Exception:
            print(f"rank {RANK}, {name}:\n{traceback.format_exc()}", flush=True)
            rows.append(f"{name:9s} FAILED (traceback above)")
            failed = True
            continue
        same = on_every_rank(torch.equal(losses, again) and torch.equal(parameters, parameters_1f1b))
        curve = by_step(losses)
        base = curve if base is None else base
        step, end = (curve - base).abs().max().item(), abs(curve[-10:].mean() - base[-10:].mean()).item()
        learned = bool(curve[-10:].mean() < 0.7 * curve[0])
        fine = same and learned and step <= STEP_TOLERANCE and end <= END_TOLERANCE
        failed |= not fine
        rows.append(
            f"{name:9s} {'ok' if fine else 'FAILED':7s} loss {curve[0]:.4f} -> {curve[-10:].mean():.4f}; from alltoall at "
            f"most {step:.4f} in a step, {end:.4f} over the last ten; no overlap and 1f1b equal bit for bit: {same}; "
            f"{plain_s * 1e3:.0f} and {overlap_s * 1e3:.0f} ms a step"
        )
        say(rows[-1])
    say(
        f"\n{STEPS} steps x {ACCUMULATE} micro-batches, EP {WORLD}, bfloat16, tolerance {STEP_TOLERANCE} a step, "
        f"{END_TOLERANCE} over the last ten"
    )
    say("\n".join(rows))
    dist.destroy_process_group()
    sys.exit(failed)
