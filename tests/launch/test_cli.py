"""`lightning-ep fit|test|predict`: the strategy by name and by class path, overrides, errors that name file and key."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_ep import EPOverlapStrategy
from lightning_ep.lightning_cli import EPLightningCLI, main
from tests.distributed import run_distributed
from tests.launch.test_launchers import ROOT, run_all

TINY: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {
        "accelerator": "cpu", "devices": 2, "max_steps": 2, "num_sanity_val_steps": 0, "limit_val_batches": 1,
        "limit_test_batches": 2, "limit_predict_batches": 2, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False,
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}},
        "strategy": {
            "class_path": "lightning_ep.EPOverlapStrategy",
            "init_args": {"expert_model_parallel_size": 2, "timeout": "0:01:00", "bucket_cap_mb": 5},
        },
    },
    "model": {
        "class_path": "CausalLMModule",  # recipes are known by their bare names
        "init_args": {
            "model_type": "qwen3_moe", "warmup_steps": 1,
            "config": {
                "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
                "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            },
        },
    },
    "data": {
        "class_path": "lightning_ep.recipes.TextFolder",
        "init_args": {"folder": str(ROOT / "lightning_ep"), "pattern": "**/*.py", "seq_length": 32, "micro_batch_size": 2},
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # LightningCLI warns when it is given arguments beside pytest's.
    monkeypatch.setattr("sys.argv", ["lightning-ep"])


def config_file(folder: Path, strategy: Any = TINY["trainer"]["strategy"]) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(TINY | {"trainer": TINY["trainer"] | {"strategy": strategy}}))
    return str(path)


def parsed(*argv: str) -> EPOverlapStrategy:
    strategy = EPLightningCLI([*argv, "--trainer.devices=1"], run=False).trainer.strategy
    assert isinstance(strategy, EPOverlapStrategy)
    return strategy


def test_class_path_arguments_and_lightnings_own_for_ddp(tmp_path: Path) -> None:
    strategy = parsed("--config", config_file(tmp_path))
    assert strategy.config.expert_model_parallel_size == 2
    assert strategy._timeout == timedelta(minutes=1)
    assert strategy._ddp_kwargs["bucket_cap_mb"] == 5


def test_the_name_alone(tmp_path: Path) -> None:
    assert parsed("--config", config_file(tmp_path, "ep_overlap")).config.expert_model_parallel_size == 1


@pytest.mark.parametrize("name", ["EPOverlapStrategy", "lightning_ep.EPOverlapStrategy"])
def test_a_class_path_alone(tmp_path: Path, name: str) -> None:
    """What `lightning-ep validate` takes for this strategy is this strategy."""
    assert parsed("--config", config_file(tmp_path, name)).config.expert_model_parallel_size == 1
    parsed("--config", config_file(tmp_path, "auto"), f"--trainer.strategy={name}")


@pytest.mark.parametrize("prefix", ["--trainer.strategy.init_args.", "--trainer.strategy."])
def test_dotted_overrides(tmp_path: Path, prefix: str) -> None:
    arguments = [f"{prefix}expert_model_parallel_size=4", f"{prefix}moe_dispatch_dedup=false"]
    config = parsed("--config", config_file(tmp_path), *arguments).config
    assert (config.expert_model_parallel_size, config.moe_dispatch_dedup) == (4, False)


def test_an_overridden_backend_wins_over_the_type(tmp_path: Path) -> None:
    key = "--trainer.strategy.init_args.moe_"
    both = [f"{key}token_dispatcher_type=alltoall", f"{key}flex_dispatcher_backend=deepep"]
    config = parsed("--config", config_file(tmp_path), *both).config
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", "deepep")
    config = parsed("--config", config_file(tmp_path), both[0], f"{key}flex_dispatcher_backend=null").config
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("alltoall", None)


@pytest.mark.parametrize(
    "wrong",
    [
        "--trainer.strategy.init_args.expert_model_parallel_size=two",
        "--trainer.strategy.init_args.overlap_schedule=2f2b",
        "--trainer.strategy.init_args.expert_parallel_size=2",
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", config_file(tmp_path), wrong])
    assert wrong.rpartition(".")[2].partition("=")[0] in capsys.readouterr().err


def test_a_configuration_that_cannot_train_is_one_message_with_file_and_key(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = config_file(
        tmp_path, {"class_path": "lightning_ep.EPOverlapStrategy", "init_args": {"delay_wgrad_compute": True}}
    )
    override = "--trainer.strategy.init_args.moe_token_dispatcher_type=allgather"
    assert main(["fit", "--config", config, "--trainer.devices=1", override]) == 1
    message = capsys.readouterr().err
    assert f"delay_wgrad_compute=True ({config}: trainer.strategy.init_args.delay_wgrad_compute)" in message
    assert "moe_token_dispatcher_type='allgather' (command line: " in message
    assert "Traceback" not in message


def run_command(folder: str, *argv: str) -> int:
    os.chdir(folder)
    sys.argv = ["lightning-ep"]
    return main(list(argv))


def test_fit_test_and_predict_on_two_ranks(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    for command in ("fit", "test", "predict"):
        assert run_distributed(run_command, 2, str(tmp_path), command, "--config", config) == [0, 0]
    logs = sorted(path.name for path in (tmp_path / "logs").rglob("*") if path.is_file())
    assert logs.count("config.yaml") == 3 and "metrics.csv" in logs
    saved = yaml.safe_load(next((tmp_path / "logs").rglob("config.yaml")).read_text())
    assert saved["trainer"]["strategy"]["init_args"]["expert_model_parallel_size"] == 2


def test_without_a_logger_no_file_of_the_users_is_overwritten(tmp_path: Path) -> None:
    config = Path(config_file(tmp_path))
    before = config.read_text()
    run_distributed(run_command, 2, str(tmp_path), "fit", "--config", str(config), "--trainer.logger=false")
    assert config.read_text() == before


@pytest.mark.slow
def test_the_command_starts_its_own_ranks(tmp_path: Path) -> None:
    demo = str(ROOT / "configs" / "demo_cpu.yaml")
    (output,) = run_all(
        [
            sys.executable, "-m", "lightning_ep", "fit", "--config", demo, "--trainer.max_steps=2",
            "--trainer.limit_val_batches=0", f"--trainer.default_root_dir={tmp_path}",
        ]
    )  # fmt: skip
    assert "MEMBER: 2/2" in output and "over EP 2" in output
