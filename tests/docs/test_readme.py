"""What the README shows works: its example runs as it stands, its links exist, the models it names are known."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_ep.cli import COMMANDS
from lightning_ep.constraints import check
from lightning_ep.experts.interface import UNSUPPORTED
from lightning_ep.facts import Facts
from tests.launch.test_launchers import ROOT, run_all

README = (ROOT / "README.md").read_text()


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["python", "torchrun"])
def test_the_example_trains_on_two_ranks(launcher: list[str], tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert sum(1 for line in code.splitlines() if line.strip()) <= 20
    script = tmp_path / "example.py"
    on_cpu = code.replace("pl.Trainer(", f'pl.Trainer(accelerator="cpu", default_root_dir={str(tmp_path)!r}, ')
    # Each rank has a file of its own: what two write to one pipe may be mixed.
    script.write_text(
        on_cpu
        + f"""
with open({str(tmp_path)!r} + f"/steps{{trainer.global_rank}}", "w") as file:
    print(trainer.global_step, file=file)
"""
    )
    (output,) = run_all([sys.executable, *launcher, str(script)])
    # 64 sequences / 2 ranks / 4 a batch / 4 micro-batches
    assert [(tmp_path / f"steps{rank}").read_text() for rank in range(2)] == ["2\n", "2\n"], output
    assert "over EP 2" in output


def test_names_and_commands_exist() -> None:
    imports = re.findall(r"^ +(from lightning_ep import .*)$", README, re.M)
    assert len(imports) >= 2
    for line in imports:
        exec(line, {})
    commands = set(re.findall(r"lightning-ep (\w+)", README))
    assert {"validate", "fit", "ab", "doctor"} <= commands <= set(COMMANDS)


def test_the_oldest_transformers_is_the_same_everywhere() -> None:
    (bound,) = re.findall(r"transformers>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    major, minor = map(int, bound.split("."))
    assert f"in {bound}, the oldest that works" in README
    assert f"transformers {bound}.0 were tried" in (ROOT / "constraints.txt").read_text()
    refused = [check(Facts(transformers_version=f"{major}.{n}.0")) for n in (minor - 1, minor)]
    assert [[v.id for v in violations] for violations in refused] == [["transformers-version"], []]


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_paths_in_commands_exist() -> None:
    paths = re.findall(r"\b(?:examples|configs|docs)/[\w/.]+\.(?:py|sh|sbatch|yaml|md)", README)
    assert "examples/demo.py" in paths
    assert not [path for path in paths if not (ROOT / path).is_file()]


def test_unsupported_families_are_all_named() -> None:
    limits = README[README.index("## Limits") :]
    missing = {reason.split()[0] for reason in UNSUPPORTED.values() if reason.split()[0] not in limits}
    assert not missing


def test_named_models_exist_in_transformers() -> None:
    from transformers import CONFIG_MAPPING

    named = {
        "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "qwen3_next", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss",
        "glm4_moe", "olmoe", "granitemoe", "ernie4_5_moe", "phimoe", "minimax", "jamba", "nemotron_h", "kimi_linear",
        "gemma4",
    }  # fmt: skip
    assert named <= set(CONFIG_MAPPING)
