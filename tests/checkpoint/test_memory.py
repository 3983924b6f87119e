"""How much host memory a rank needs for a model whose experts are spread over EP ranks.

    built on meta, initialised     dense + experts / EP
    + weights from Hugging Face    the same again for the pages of the files that were read
    + a checkpoint                 the same again for what was read, and one tensor of one layer as it was saved

and never all experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config())


def config() -> Any:
    return transformers.AutoConfig.for_model(
        "qwen3_moe", num_experts=EXPERTS, num_hidden_layers=LAYERS, hidden_size=HIDDEN, moe_intermediate_size=INNER,
        num_experts_per_tok=2, vocab_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, use_cache=False,
    )  # fmt: skip


def initialise() -> tuple[int, int]:
    mesh = build_mesh(EP, "cpu")
    with Peak() as peak:
        parallel = ParallelModel(on_meta(), EPConfig(expert_model_parallel_size=EP), mesh)
        parallel.shard()
        parallel.materialize(torch.device("cpu"))
    return peak.bytes, sum(t.nbytes for t in parallel.expert_tensors())


def load_pretrained(folder: Path) -> tuple[int, int]:
    with Peak() as peak:
        parallel, _ = spread(folder, EP)
    return peak.bytes, sum(t.nbytes for t in parallel.expert_tensors())


class OnMeta(CausalLM):
    def __init__(self) -> None:
        super().__init__(torch.nn.Identity())
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = on_meta()

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0]).logits


def run(save: Path | None, load: Path | None, ep_size: int) -> int:
    trainer = quiet_trainer(
        strategy=EPOverlapStrategy(expert_model_parallel_size=ep_size), use_distributed_sampler=False
    )
    with Peak() as peak:
        trainer.predict(OnMeta(), DataLoader(RankBatches(1, 1, 0), batch_size=1), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return peak.bytes


def test_built_on_meta() -> None:
    for peak, experts in run_distributed(initialise, EP):
        assert experts == EXPERT_BYTES // EP
        assert peak < EXPERT_BYTES // EP + SLACK


def test_from_hugging_face(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    for peak, experts in run_distributed(load_pretrained, EP, tmp_path):
        assert experts == EXPERT_BYTES // EP
        assert peak < 2 * EXPERT_BYTES // EP + SLACK < EXPERT_BYTES


def test_from_a_checkpoint_of_one_process(tmp_path: Path) -> None:
    run_distributed(run, 1, tmp_path / "one.ckpt", None, 1)
    for peak in run_distributed(run, EP, None, tmp_path / "one.ckpt", EP):
        assert peak < 2 * EXPERT_BYTES // EP + ONE_TENSOR + SLACK < EXPERT_BYTES
