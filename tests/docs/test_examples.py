"""Every example runs as its docstring says, on two CPU ranks and for a few steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.launch.test_launchers import ROOT, free_port, run_all

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
TEXT = str(ROOT / "lightning_ep")


def run_example(folder: Path, name: str, *arguments: str) -> str:
    return run_all([sys.executable, str(EXAMPLES / name), *arguments], cwd=folder)[0]


def test_demo(tmp_path: Path) -> None:
    output = run_example(tmp_path, "demo.py", "--steps", "20", "--text", TEXT)
    losses = [float(loss) for loss in re.findall(r"train_loss (\d+\.\d+)", output)]
    assert losses[-1] < losses[0] - 1
    together, alone = re.findall(r"held-out, \S+(?: EP)?\s+(\d+\.\d+) bits a byte", output)
    assert together == alone and "in one process: the same" in output
    assert (tmp_path / "runs" / "demo" / "checkpoint").is_dir()
    shares = re.findall(r"^ +\d +((?:\d+\.\d +){7}\d+\.\d)", output, re.M)
    assert [round(sum(map(float, row.split()))) for row in shares] == [100] * 4
    assert len(output.splitlines()) < 100  # a log file, not thousands of bars


def test_pretraining_resumes(tmp_path: Path) -> None:
    arguments = ["--text", TEXT, "--seq-length", "64", "--max-steps"]
    run_example(tmp_path, "pretrain_qwen3_moe.py", *arguments, "2")
    run_example(tmp_path, "pretrain_qwen3_moe.py", *arguments, "4", "--resume", "last")
    assert {path.name for path in (tmp_path / "runs" / "qwen3_moe").glob("*step=*")} >= {"epoch=0-step=4.ckpt"}


def test_finetuning_reads_and_writes_hugging_face_checkpoints(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 256}
    config = Qwen3MoeConfig(
        num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **sizes
    )
    torch.manual_seed(0)
    before = AutoModelForCausalLM.from_config(config)
    before.save_pretrained(tmp_path / "before")
    run_example(
        tmp_path, "finetune_checkpoint.py", "--checkpoint", str(tmp_path / "before"), "--text", TEXT, "--tokenizer",
        "bytes", "--seq-length", "64", "--accumulate", "2", "--max-steps", "3", "--lr", "1e-3", "--devices", "2",
        "--ep", "2", "--out", str(tmp_path / "after"),
    )  # fmt: skip
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    ids = torch.tensor([list(b"from __future__ import annotations\n\nimport ")])
    with torch.no_grad():
        assert after(input_ids=ids, labels=ids).loss < before(input_ids=ids, labels=ids).loss - 0.01


def test_own_model(tmp_path: Path) -> None:
    output = run_example(tmp_path, "own_moe_module.py", "--max-steps", "3", "--text", TEXT)
    assert "4 layers over EP 2" in output and "`max_steps=3` reached" in output


def test_the_torchrun_script_on_two_nodes(tmp_path: Path) -> None:
    node = {
        "MASTER_PORT": free_port(), "NNODES": "2", "GPUS_PER_NODE": "1", "CONFIG": str(ROOT / "configs/demo_cpu.yaml"),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }  # fmt: skip
    command = [
        "bash", str(EXAMPLES / "launch" / "torchrun.sh"), "--trainer.max_steps=2", "--trainer.limit_val_batches=0",
        f"--trainer.default_root_dir={tmp_path}",
    ]  # fmt: skip
    nodes = {f"env{rank}": node | {"NODE_RANK": str(rank)} for rank in range(2)}
    outputs = run_all(command, command, **nodes)
    assert any("`max_steps=2` reached" in output for output in outputs)
