"""Checkpoints and Hugging Face weights on GPUs over NCCL: resuming is exact, other EP sizes load, export is what was read.

torchrun (or on_one_gpu N) tests/gpu/check_checkpoint.py, with 2 or 4 ranks
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy, export_pretrained, from_pretrained
from lightning_ep.checkpoint import load_full_state_dict
from tests.gpu.common import DEVICES, RANK, WORLD, say, start
from tests.reference import tiny_model
from tests.trained import CausalLM, RankBatches

STEPS = 3


class Module(CausalLM):
    """Weights from a Hugging Face checkpoint, read straight to the GPU; validated, so that saving sees inference mode."""

    def __init__(self, folder: Path) -> None:
        super().__init__(torch.nn.Identity())
        self.folder, self.model = folder, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = from_pretrained(self.folder, attn_implementation="eager")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("score", self.model(input_ids=batch[0], labels=batch[0]).loss, sync_dist=True)


def fit(folder: Path, ep_size: int, epochs: int, saving: Path | None = None, load: Path | None = None) -> Module:
    module = Module(folder / "hub")
    callbacks: list[Any] = []
    if saving is not None:
        callbacks = [ModelCheckpoint(saving, filename="{epoch}", monitor="score", save_top_k=-1, save_last=True)]
    trainer = pl.Trainer(
        **DEVICES, strategy=EPOverlapStrategy(expert_model_parallel_size=ep_size), max_epochs=epochs, callbacks=callbacks,
        enable_checkpointing=saving is not None, use_distributed_sampler=False, num_sanity_val_steps=0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    data = DataLoader(RankBatches(STEPS, 1, RANK), batch_size=1)
    trainer.fit(module, data, data, ckpt_path=load)
    return module


def losses(module: Module) -> Tensor:
    return torch.stack(module.losses).cpu()


def main() -> None:
    start()
    shared = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    if RANK == 0:
        tiny_model("qwen3_moe").save_pretrained(folder / "hub")
    dist.barrier()
    straight = fit(folder, WORLD, 2, folder / "saved")
    first, last = folder / "saved/epoch=0.ckpt", folder / "saved/last.ckpt"
    resumed = fit(folder, WORLD, 2, load=first)
    assert torch.equal(losses(resumed), losses(straight)[STEPS:]), (losses(resumed), losses(straight))
    say("resumed at the same EP size: the same losses, bit for bit")
    other = fit(folder, 1, 2, load=first)
    torch.testing.assert_close(losses(other), losses(straight)[STEPS:], rtol=1e-4, atol=0)
    say(f"resumed at EP 1 instead of {WORLD}: the same losses to 1e-4")
    export_pretrained(resumed, folder / "exported")
    if RANK == 0:
        again = from_pretrained(folder / "exported").state_dict()
        saved = load_full_state_dict(last)
        assert all(torch.equal(again[name], saved[f"model.{name}"]) for name in again)
    say("exported: what the checkpoint of the other run holds, bit for bit")
    dist.barrier()
    say("PASS")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
