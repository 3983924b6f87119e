"""A small Qwen3-MoE whose experts live on two ranks: trained on real text, saved, reloaded in one process.

    python examples/demo.py                     # the sources of Python's standard library
    python examples/demo.py --text some/folder  # any folder of text files

Starts its own ranks: two CPU processes, or GPUs where there are any. Under four minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import RichProgressBar
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_ep import EPOverlapStrategy
from lightning_ep.checkpoint import load_full_state_dict
from lightning_ep.dispatch.base import routing_observers
from lightning_ep.recipes import CausalLMModule, LineProgress, TextFolder
from lightning_ep.recipes.causal_lm import next_token_loss

LAYERS, EXPERTS, TOP_K = 4, 8, 2
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "config": {
        "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 256, "max_position_embeddings": 512, "norm_topk_prob": True,
        "initializer_range": 0.05, "output_router_logits": True, "router_aux_loss_coef": 0.01,
    },
    "lr": 6e-3, "min_lr_ratio": 0.05, "warmup_steps": 30,
}  # fmt: skip
SEQUENCE, BATCH = 128, 8
# Two free cores need less; on a busy machine the demo ends early rather than late.
MAX_TRAINING = timedelta(seconds=150)

console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)


class Record(Callback):
    """The loss of every step, the tokens that each expert of this rank got while training, a checkpoint at the end."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.losses: list[Tensor] = []
        self.tokens: dict[int, Tensor] = {}
        self.seconds = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = -time.perf_counter()
        routing_observers.append(self._count)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.perf_counter()
        routing_observers.remove(self._count)
        trainer.save_checkpoint(self.checkpoint)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].detach())

    def _count(self, layer: int, tokens_per_expert: list[int]) -> None:
        if torch.is_grad_enabled():  # not the held-out text
            new = torch.tensor(tokens_per_expert)
            self.tokens[layer] = self.tokens[layer] + new if layer in self.tokens else new

    def all_tokens(self) -> Tensor:
        """Tokens by layer and expert, `[layers, experts]`, from all ranks. Collective."""
        mine = torch.stack([self.tokens[layer] for layer in sorted(self.tokens)])
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        return torch.cat(ranks, dim=1)


def main() -> int:
    args = parse_arguments()
    quiet()
    seed_everything(0)
    gpus = torch.cuda.device_count()
    ranks = min(2, gpus) if gpus else 2
    data = TextFolder(args.text, seq_length=SEQUENCE, micro_batch_size=BATCH)
    data.setup()
    assert data.train is not None
    module, record = CausalLMModule(**MODEL), Record(Path(args.out) / "checkpoint")
    bar = sys.stdout.isatty()
    trainer = Trainer(
        accelerator="gpu" if gpus else "cpu",
        devices=ranks,
        strategy=EPOverlapStrategy(expert_model_parallel_size=ranks),
        precision="bf16-mixed" if gpus else "32-true",
        max_steps=args.steps,
        max_epochs=math.ceil(args.steps / max(1, len(data.train) // (ranks * BATCH))),
        max_time=MAX_TRAINING,
        val_check_interval=max(1, args.steps // 5),
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        callbacks=[record, RichProgressBar() if bar else LineProgress(max(1, args.steps // 20))],
        enable_progress_bar=bar,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=False,
    )
    if trainer.is_global_zero:
        introduce(args, data, ranks, bool(gpus))
    trainer.fit(module, data)
    (held_out,) = trainer.validate(module, data, verbose=False)
    tokens = record.all_tokens()
    if not trainer.is_global_zero:
        return 0

    console.print(expert_table(tokens, ranks))
    console.rule("the checkpoint in one process, without expert parallelism", align="left")
    alone = reload_in_one_process(record.checkpoint, trainer.strategy.root_device)
    loss_alone = held_out_loss(alone, data, autocast=bool(gpus))
    prompt = b"import os\n\n\nclass " if args.text is None else bytes(data.held_out[0][:40].tolist())
    console.print(generate(alone, prompt), markup=False)
    console.print()
    same = abs(loss_alone - held_out["val_loss"]) < (5e-3 if gpus else 1e-5) * held_out["val_loss"]
    console.print(summary(trainer, record, held_out["val_loss"], loss_alone, same))
    if not same:
        console.print("The held-out loss changed on the way through the checkpoint: this is a bug.", style="red")
    return 0 if same else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", metavar="FOLDER", help="a folder of text files; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (%(default)s)")
    parser.add_argument("--out", metavar="FOLDER", default="runs/demo", help="where the checkpoint goes (%(default)s)")
    return parser.parse_args()


def quiet() -> None:
    """Only what this demo has to say."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def introduce(args: argparse.Namespace, data: TextFolder, ranks: int, gpus: bool) -> None:
    assert data.train is not None
    console.rule("lightning_ep demo", align="left")
    console.print(
        f"A Qwen3-MoE with {EXPERTS} experts a layer, {TOP_K} for each byte, on {ranks} "
        f"{'GPU' if gpus else 'CPU process'}{'' if ranks == 1 else 's' if gpus else 'es'}: "
        f"{EXPERTS // ranks} experts on each (expert parallelism, EP {ranks})."
    )
    if ranks == 1:
        console.print("With one GPU nothing travels between ranks; two GPUs would share the experts.")
    console.print(
        f"It learns {data.train.windows.numel() / 1e6:.1f} MB of {args.text or 'the Python standard library'} "
        f"byte by byte, {args.steps} steps of {ranks} x {BATCH} x {SEQUENCE} bytes; other files are held out.\n"
    )


def reload_in_one_process(checkpoint: Path, device: torch.device) -> CausalLMModule:
    """The same module with all experts, from the shards of all ranks; no strategy, no process group."""
    module = CausalLMModule(**MODEL)
    module.configure_model()
    module.load_state_dict(load_full_state_dict(checkpoint))
    return module.to(device).eval()


@torch.no_grad()
def held_out_loss(module: CausalLMModule, data: TextFolder, autocast: bool) -> float:
    """Nats a byte."""
    total, count = 0.0, 0
    for ids in data.val_dataloader():
        ids = ids.to(module.device)
        with torch.autocast(module.device.type, torch.bfloat16, enabled=autocast):
            losses = next_token_loss(module(ids), ids)
        total, count = total + losses.sum(dtype=torch.float64).item(), count + losses.numel()
    return total / count


def generate(module: CausalLMModule, prompt: bytes, length: int = 320) -> str:
    ids = torch.tensor([list(prompt)], device=module.device)
    assert module.model is not None
    out = module.model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        use_cache=True,
        pad_token_id=0,
    )
    text = bytes(out[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "." for c in text)


def expert_table(tokens: Tensor, ranks: int) -> Table:
    """Tokens each expert got while training, as a share of its layer's."""
    title = f"tokens each expert got, in % of the {tokens[0].sum():,} of its layer (even: {100 / EXPERTS})"
    table = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold")
    table.add_column("\nlayer", justify="right")
    for expert in range(EXPERTS):
        table.add_column(f"rank {expert * ranks // EXPERTS}\n{expert}", justify="right")
    for layer, row in enumerate(tokens):
        table.add_row(str(layer), *(f"{share:.1f}" for share in (100 * row / row.sum()).tolist()))
    return table


def summary(trainer: Trainer, record: Record, together: float, alone: float, same: bool) -> Table:
    ranks, steps = trainer.world_size, len(record.losses)
    where = "GPU, bf16" if isinstance(trainer.accelerator, CUDAAccelerator) else "CPU, float32"
    losses, trained = torch.stack(record.losses), steps * ranks * BATCH * SEQUENCE
    size = sum(path.stat().st_size for path in record.checkpoint.rglob("*") if path.is_file())
    minutes, seconds = divmod(round(record.seconds), 60)
    rows = {
        "ranks": f"{ranks} x {where}; EP {ranks}: {EXPERTS // ranks} of {EXPERTS} experts on each",
        "trained": f"{steps} of {trainer.max_steps} steps, {trained / 1e6:.2f} MB in {minutes}:{seconds:02}",
        "training loss": f"{losses[0]:.2f} -> {losses[-20:].mean():.2f} nats a byte",
        "held-out, with EP": f"{together / math.log(2):.5f} bits a byte",
        "held-out, reloaded": f"{alone / math.log(2):.5f} bits a byte, in one process: "
        + ("the same" if same else "DIFFERENT"),
        "checkpoint": f"{record.checkpoint} ({size / 1e6:.0f} MB with optimizer state)",
    }
    table = Table(box=box.SIMPLE, show_header=False, title="summary", title_justify="left", title_style="bold")
    for name, text in rows.items():
        table.add_row(name, text)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
