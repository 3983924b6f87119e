"""How much host memory a rank needs for a model whose experts are spread over EP ranks.

    built on meta, initialised     dense + experts / EP
    + weights from Hugging Face    the same again for the pages of the files that were read, and a layer being merged
    + a checkpoint                 the same again for what was read, and one tensor of one layer as it was saved

and never all experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch.utils.data import DataLoader

from lightning_ep import EPOverlapStrategy
from lightning_ep.config import EPConfig
from lightning_ep.experts.model import ParallelModel
from lightning_ep.mesh import build_mesh
from tests.checkpoint.hub import spread
from tests.distributed import run_distributed
from tests.trained import CausalLM, RankBatches, quiet_trainer

EP, EXPERTS, LAYERS, HIDDEN, INNER = 4, 32, 4, 256, 512
EXPERT_BYTES = LAYERS * EXPERTS * 3 * HIDDEN * INNER * 4  # 192 MiB
ONE_TENSOR = EXPERTS * 2 * HIDDEN * INNER * 4  # gate and up of one layer, whole
SLACK = 24 * 2**20  # dense weights and whatever Python, the allocator and gloo take


class Peak:
    """Growth of the process's peak resident memory, in bytes."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.before = self._read("VmRSS")
        return self

    def __exit__(self, *args: Any) -> None:
        self.bytes = self._read("VmHWM") - self.before

    def _read(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def config(inner: int) -> Any:
    return transformers.AutoConfig.for_model(
        "qwen3_moe", num_experts=EXPERTS, num_hidden_layers=LAYERS, hidden_size=HIDDEN, moe_intermediate_size=inner,
        num_experts_per_tok=2, vocab_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, use_cache=False,
    )  # fmt: skip


def on_meta(inner: int) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config(inner))


def measured(action: Callable[[int], Any]) -> tuple[int, Any]:
    """Peak of `action(INNER)`, after a small one that imports and allocates whatever is needed once."""
    action(8)
    with Peak() as peak:
        result = action(INNER)
    return peak.bytes, result


def expert_bytes(parallel: ParallelModel) -> int:
    return sum(t.nbytes for t in parallel.expert_tensors())


def initialise() -> tuple[int, int]:
    mesh = build_mesh(EP, "cpu")

    def build(inner: int) -> int:
        parallel = ParallelModel(on_meta(inner), EPConfig(expert_model_parallel_size=EP), mesh)
        parallel.shard()
        parallel.materialize(torch.device("cpu"))
        return expert_bytes(parallel)

    return measured(build)


def load_pretrained(folder: Path) -> tuple[int, int]:
    return measured(lambda inner: expert_bytes(spread(folder / str(inner), EP)[0]))


class OnMeta(CausalLM):
    def __init__(self, inner: int) -> None:
        super().__init__(torch.nn.Identity())
        self.inner, self.model = inner, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = on_meta(self.inner)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0]).logits


def run(inner: int, load: Path | None, ep_size: int) -> pl.Trainer:
    trainer = quiet_trainer(
        strategy=EPOverlapStrategy(expert_model_parallel_size=ep_size), use_distributed_sampler=False
    )
    trainer.predict(OnMeta(inner), DataLoader(RankBatches(1, 1, 0), batch_size=1), ckpt_path=load)
    return trainer


def save_alone(folder: Path) -> None:
    for inner in (8, INNER):
        run(inner, None, 1).save_checkpoint(folder / f"{inner}.ckpt")


def load_checkpoint(folder: Path) -> int:
    return measured(lambda inner: run(inner, folder / f"{inner}.ckpt", EP) and None)[0]


def test_built_on_meta() -> None:
    for peak, experts in run_distributed(initialise, EP):
        assert experts == EXPERT_BYTES // EP
        assert peak < EXPERT_BYTES // EP + SLACK


def test_from_hugging_face(tmp_path: Path) -> None:
    for inner in (8, INNER):
        model = transformers.AutoModelForCausalLM.from_config(config(inner))
        model.save_pretrained(tmp_path / str(inner))
    for peak, experts in run_distributed(load_pretrained, EP, tmp_path):
        assert experts == EXPERT_BYTES // EP
        assert peak < 2 * EXPERT_BYTES // EP + ONE_TENSOR + SLACK < EXPERT_BYTES


def test_from_a_checkpoint_of_one_process(tmp_path: Path) -> None:
    run_distributed(save_alone, 1, tmp_path)
    for peak in run_distributed(load_checkpoint, EP, tmp_path):
        assert peak < 2 * EXPERT_BYTES // EP + ONE_TENSOR + SLACK < EXPERT_BYTES
