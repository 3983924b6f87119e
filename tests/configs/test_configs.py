"""Every file in `configs/` parses, its classes instantiate, its model is built on the meta device and fits its EP size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from lightning_ep import EPOverlapStrategy, find_experts
from lightning_ep.lightning_cli import EPLightningCLI

CONFIGS = Path(__file__).parents[2] / "configs"
PARAMETERS = {"qwen3_moe": 30.5e9, "mixtral": 46.7e9}
GLOBAL_BATCH = {"qwen3_30b_a3b_ep16": 1024, "mixtral_8x7b_ep8": 256, "demo_cpu": 16}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_config_instantiates_on_the_meta_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-ep"])
    written = yaml.safe_load(path.read_text())["trainer"]
    here = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.logger=false"]
    cli = EPLightningCLI(["--config", str(path), *here], run=False)

    strategy = cli.trainer.strategy
    assert isinstance(strategy, EPOverlapStrategy)
    ranks = written["devices"] * written.get("num_nodes", 1)
    assert ranks % strategy.config.expert_model_parallel_size == 0

    with torch.device("meta"):
        cli.model.configure_model()
    found = find_experts(cli.model)
    assert len(found) == cli.model.model.config.num_hidden_layers
    assert all(experts.num_experts % strategy.config.expert_model_parallel_size == 0 for experts in found)
    if path.stem != "demo_cpu":
        total = sum(p.numel() for p in cli.model.parameters())
        assert total == pytest.approx(PARAMETERS[cli.model.hparams.model_type], rel=0.01)

    data = cli.datamodule
    data.setup("fit")
    ids = next(iter(data.train_dataloader()))
    assert ids.shape == (data.hparams.micro_batch_size, data.hparams.seq_length)
    assert ids.max() < cli.model.model.config.vocab_size
    global_batch = len(ids) * ranks * written.get("accumulate_grad_batches", 1)
    assert global_batch == next(size for name, size in GLOBAL_BATCH.items() if path.stem.startswith(name))


def test_the_three_dispatchers_differ_in_the_dispatcher_alone() -> None:
    documents = {}
    for path in CONFIGS.glob("qwen3_30b_a3b_ep16*.yaml"):
        document = yaml.safe_load(path.read_text())
        arguments = document["trainer"]["strategy"]["init_args"]
        kind = arguments.pop("moe_token_dispatcher_type"), arguments.pop("moe_flex_dispatcher_backend", None)
        documents[kind] = document
    assert documents.keys() == {("alltoall", None), ("flex", "deepep"), ("flex", "hybridep")}
    first, *others = documents.values()
    assert all(other == first for other in others)
