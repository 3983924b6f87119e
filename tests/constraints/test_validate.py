"""`lightning-ep validate` over good and broken configs, in the process and as the command that people type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_ep.config_file import number_of_devices, read_config
from lightning_ep.facts import FACT_NAMES
from lightning_ep.validate import main

ROOT = Path(__file__).parents[2]
BROKEN = sorted((Path(__file__).parent / "broken").glob("*.yaml"))

GOOD: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {
        "accelerator": "gpu",
        "devices": 8,
        "num_nodes": 3,
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 8,
        "strategy": {
            "class_path": "lightning_ep.EPOverlapStrategy",
            "init_args": {
                "expert_model_parallel_size": 8,
                "overlap_moe_expert_parallel_comm": True,
                "timeout": "0:20:00",
                "bucket_cap_mb": 50,
            },
        },
    },
    "model": {"class_path": "tests.constraints.models.TinyQwen"},
}

# The facts that the command line must be able to state, by the project's specification.
SPECIFIED = [
    "expert_model_parallel_size",
    "num_moe_experts",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "moe_shared_expert_overlap",
    "moe_shared_expert_intermediate_size",
    "precision",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "mtp_num_layers",
    "cuda_graph_scope",
    "gradient_accumulation_fusion",
    "overlap_grad_reduce",
    "add_bias_linear",
    "add_qkv_bias",
    "experts_implementation",
    "torch_version",
    "te_version",
    "gpu_name",
    "gpu_capability",
    "world_size",
]


def write(folder: Path, document: Any) -> str:
    path = folder / "run.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return str(path)


def check(capsys: pytest.CaptureFixture[str], path: str, *facts: str) -> tuple[int, list[dict[str, str]]]:
    code = main(["--config", path, "--json", *(f"--fact={fact}" for fact in facts)])
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"ok", "violations"} and answer["ok"] == (code == 0)
    for found in answer["violations"]:
        assert set(found) == {"id", "severity", "symptom", "cause", "fix"} and all(found.values())
    return code, answer["violations"]


def ids(violations: list[dict[str, str]]) -> list[str]:
    return sorted(found["id"] for found in violations)


def test_a_good_config_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, write(tmp_path, GOOD)) == (0, [])
    assert check(capsys, write(tmp_path, {"fit": GOOD})) == (0, [])


def test_a_good_config_says_what_it_comes_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, GOOD)
    assert main(["--config", path]) == 0
    line = "ep_overlap: schedule 1f1b (accumulate_grad_batches=8); dispatcher alltoall; expert wgrad in the backward; EP 8 x EDP 3"
    assert capsys.readouterr().out.splitlines() == [f"{path}: ok", line]
    facts = ["delay_wgrad_compute=true", "accumulate_grad_batches=1", "batch_size=2", "world_size=none"]
    assert main(["--config", path, *(f"--fact={fact}" for fact in facts)]) == 0
    line = "ep_overlap: schedule two_batch (no accumulation that pairs micro-batches); dispatcher alltoall; expert wgrad delayed; EP 8"
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert main(["--config", path, "--fact=num_moe_experts=12"]) == 1
    assert "ep_overlap:" not in capsys.readouterr().out
    assert main(["--config", write(tmp_path, {"trainer": {}})]) == 0  # a warning: Lightning's own strategy
    assert "ep_overlap:" not in capsys.readouterr().out


SAVES_TO_S3 = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "s3://bucket/run"}}
LOGS_TO_GS = {"class_path": "CSVLogger", "init_args": {"save_dir": "gs://bucket/logs"}}
ASYNC = {"class_path": "lightning.pytorch.plugins.AsyncCheckpointIO"}


@pytest.mark.parametrize(
    ("trainer", "cause"),
    [
        ({"callbacks": [SAVES_TO_S3]}, "checkpoint_dir='s3://bucket/run' ({path}: trainer.callbacks.init_args.dirpath)"),
        ({"callbacks": SAVES_TO_S3 | {"class_path": "ModelCheckpoint"}}, "checkpoint_dir='s3://bucket/run'"),
        ({"default_root_dir": "gs://bucket"}, "checkpoint_dir='gs://bucket' ({path}: trainer.default_root_dir)"),
        ({"logger": [LOGS_TO_GS], "default_root_dir": "/data"},
         "checkpoint_dir='gs://bucket/logs' ({path}: trainer.logger.init_args.save_dir)"),
        ({"plugins": [ASYNC]}, "checkpoint_io='AsyncCheckpointIO' ({path}: trainer.plugins)"),
        ({"plugins": "AsyncCheckpointIO"}, "checkpoint_io='AsyncCheckpointIO'"),
        ({"default_root_dir": "gs://bucket", "enable_checkpointing": False}, ""),
        ({"default_root_dir": "gs://bucket", "callbacks": [SAVES_TO_S3 | {"init_args": {"dirpath": "/data"}}]}, ""),
        ({"plugins": ["TorchCheckpointIO"], "logger": False, "callbacks": ["RichProgressBar"]}, ""),
    ],
)  # fmt: skip
def test_checkpoints_that_cannot_be_written(
    trainer: dict[str, Any], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, GOOD | {"trainer": GOOD["trainer"] | trainer})
    code, violations = check(capsys, path)
    causes = [found["cause"] for found in violations]
    assert (code, len(causes)) == ((1, 1) if cause else (0, 0))
    assert not cause or cause.format(path=path) in causes[0]


def test_the_projects_own_configs_pass(capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((ROOT / "configs").glob("**/*.yaml")):
        assert main(["--config", str(path)]) == 0, f"{path}\n{capsys.readouterr().out}"


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_config_shows_its_rules(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [name.strip() for name in path.read_text().splitlines()[0].removeprefix("# expect:").split(",")]
    code, violations = check(capsys, str(path))
    assert ids(violations) == sorted(expected)
    assert code == int("error" in {found["severity"] for found in violations})
    assert main(["--config", str(path)]) == code
    table = capsys.readouterr().out
    assert all(identifier in table for identifier in expected)


def test_a_message_names_argument_file_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GOOD_12 = GOOD | {"model": {"class_path": "tests.constraints.models.TinyQwen", "init_args": {"num_experts": 12}}}
    path = write(tmp_path, GOOD_12)
    _, (found,) = check(capsys, path)
    key = "trainer.strategy.init_args.expert_model_parallel_size"
    assert f"expert_model_parallel_size=8 ({path}: {key})" in found["cause"]
    assert "num_moe_experts=12 (num_experts of Qwen2MoeConfig)" in found["cause"]


@pytest.mark.parametrize("fact", SPECIFIED)
def test_every_specified_fact_can_be_stated(fact: str) -> None:
    assert fact in FACT_NAMES


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (["num_moe_experts=60"], ["experts-divisible"]),
        (["world_size=20"], ["world-divisible"]),
        (["precision=32-true"], ["overlap-precision"]),
        (["torch_version=2.5.1"], ["overlap-torch-version"]),
        (["mtp_num_layers=2"], ["overlap-mtp-layers"]),
        (["recompute_granularity=full"], ["overlap-full-recompute", "recompute-is-the-models"]),
        (["delay_wgrad_compute=true", "cuda_graph_scope=attn,moe_router", "te_version=2.11.0",
          "experts_implementation=transformer_engine", "gradient_accumulation_fusion=true", "add_qkv_bias=false"],
         ["cuda-graph-use-cache", "wgrad-in-graph-te-version"]),
        (["delay_wgrad_compute=true", "experts_implementation=transformer_engine", "overlap_grad_reduce=true",
          "te_version=2.6.0"], ["te-experts-version", "wgrad-grad-reduce-te-version"]),
        (["moe_token_dispatcher_type=flex", "moe_flex_dispatcher_backend=deepep", "gpu_name=NVIDIA GB200"],
         ["deepep-gpu"]),
        (["moe_token_dispatcher_type=flex", "moe_flex_dispatcher_backend=hybridep", "gpu_capability=7.5"],
         ["hybridep-gpu"]),
        (["moe_token_dispatcher_type=flex", "moe_flex_dispatcher_backend=hybridep", "gpu_name=NVIDIA GB200"], []),
        (["expert_model_parallel_size=16", "num_moe_experts=64", "world_size=32"], []),
    ],
)  # fmt: skip
def test_a_laptop_checks_a_cluster(
    facts: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, violations = check(capsys, write(tmp_path, GOOD), *facts)
    assert ids(violations) == expected
    assert code == int(bool(expected))
    if expected:
        causes = " ".join(found["cause"] for found in violations)
        assert any(f"(--fact {fact.partition('=')[0]})" in causes for fact in facts)


def test_stating_a_gpu_machine_leaves_a_cpu_rehearsal_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsal = GOOD | {"trainer": GOOD["trainer"] | {"accelerator": "cpu", "precision": "32-true"}}
    path = write(tmp_path, rehearsal)
    assert ids(check(capsys, path)[1]) == ["overlap-precision-cpu"]
    assert ids(check(capsys, path, "gpu_name=NVIDIA H100")[1]) == ["overlap-precision"]


def test_the_backend_wins_over_the_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = ["--fact=moe_token_dispatcher_type=alltoall", "--fact=moe_flex_dispatcher_backend=deepep"]
    assert main(["--config", write(tmp_path, GOOD), "--json", *facts]) == 0
    assert "the backend wins, moe_token_dispatcher_type is now 'flex'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("ep_overlap", []),
        ("ddp", ["other-strategy"]),
        ({"class_path": "EPOverlapStrategy"}, []),
        ({"class_path": "lightning_ep.strategy.EPOverlapStrategy"}, []),
        ({"class_path": "lightning.pytorch.strategies.DDPStrategy"}, ["other-strategy"]),
        (None, ["no-strategy"]),
    ],
)
def test_ways_to_name_the_strategy(
    strategy: Any, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"trainer": {"precision": "bf16-true"} | ({"strategy": strategy} if strategy else {})}
    assert ids(check(capsys, write(tmp_path, config))[1]) == expected


@pytest.mark.parametrize(
    ("model", "note"),
    [
        ({"class_path": "nowhere.Model", "init_args": {"num_experts": 12}}, "No module named 'nowhere'"),
        ({"class_path": "tests.constraints.models.NeedsTheTrainer", "init_args": {"num_experts": 12}}, "RuntimeError"),
    ],
)
def test_models_that_cannot_be_built(
    model: dict[str, Any], note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, GOOD | {"model": model})
    assert main(["--config", path]) == 1
    printed = capsys.readouterr()
    assert "experts-divisible" in printed.out and f"{path}: model.init_args.num_experts" in printed.out.replace(
        "\n", ""
    )
    assert "could not be built on the meta device" in printed.err and note in printed.err


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("trainer: [1", "is no YAML"),
        ("just a sentence", "holds no LightningCLI config"),
        ("trainer: 3", "trainer is 3"),
        ("trainer: {strategy: {class_path: x, init_args: [1]}}", "init_args is [1]"),
        ("fit: [1]", "fit is [1]; expected keys"),
        ("trainer: {strategy: [ep_overlap]}", "trainer.strategy is ['ep_overlap']; expected a name, or class_path"),
        ("trainer: {strategy: {class_path: 5}}", "trainer.strategy is {'class_path': 5}; expected a name"),
        ("trainer: {strategy: ep_overlap}\nmodel: &m {init_args: {teacher: *m}}", "an anchor is used inside of itself"),
        ("trainer: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("trainer: {devices: " + "1" * 5000 + "}", "is no YAML"),
        ("trainer: !!python/object/apply:os.system ['echo unsafe']", "is no YAML"),
    ],
)
def test_unreadable_files(document: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, document)
    assert main(["--config", path]) == 2
    assert f"{path}: " in (error := capsys.readouterr().err) and message in error


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "num_expert=8",
            "unknown fact 'num_expert'; did you mean 'num_moe_experts'? All facts: lightning-ep validate --help",
        ),
        ("backend=deepep", "did you mean 'moe_flex_dispatcher_backend'?"),
        ("zzz=1", "unknown fact 'zzz'; the facts are expert_model_parallel_size, "),
        ("world_size", "expected NAME=VALUE"),
        ("world_size=many", "world_size='many' is no value of this fact; expected int"),
        ("origins=x", "unknown fact 'origins'"),
        ("world_size=-2", "world_size='-2' is no value of this fact; expected int"),
        ("world_size=\N{SUPERSCRIPT TWO}", "is no value of this fact; expected int"),
        ("world_size=" + "9" * 5000, "is no value of this fact; expected int"),
        ("expert_model_parallel_size=0", "is not a size; set it to an integer of at least 1"),
        ("overlap_schedule=2f2b", "is not a choice; use one of 'auto', '1f1b', 'two_batch'"),
    ],
)
def test_wrong_statements(statement: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", write(tmp_path, GOOD), "--fact", statement]) == 2
    assert message in capsys.readouterr().err


def test_keys_that_are_no_text_and_sizes_that_are_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {7: 1, "expert_model_parallel_size": None}
    strategy = {"class_path": "lightning_ep.EPOverlapStrategy", "init_args": arguments}
    code, violations = check(capsys, write(tmp_path, {"trainer": {"strategy": strategy, 8: 2}}))
    assert code == 1 and sorted(ids(violations)) == ["invalid-value", "unknown-argument", "unknown-argument"]


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "/nowhere/run.yaml"]) == 2
    assert "/nowhere/run.yaml: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "number"),
    [
        (8, 8),
        ("8", 8),
        ([0, 1], 2),
        ("0,1,2", 3),
        ("3,", 1),
        ("auto", None),
        (-1, None),
        (None, None),
        (0, None),
        ("\N{SUPERSCRIPT TWO}", None),
    ],
)
def test_devices(devices: Any, number: int | None) -> None:
    assert number_of_devices(devices) == number


def test_origins_for_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, {"fit": GOOD})
    origins = read_config(path).origins
    assert origins["precision"] == f"{path}: fit.trainer.precision"
    assert origins["world_size"] == f"{path}: fit.trainer.devices x trainer.num_nodes"


def test_the_command_that_people_type() -> None:
    command = [sys.executable, "-m", "lightning_ep", "validate", "--config", "tests/constraints/broken/world.yaml"]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert [found["id"] for found in json.loads(done.stdout)["violations"]] == ["world-divisible"]
