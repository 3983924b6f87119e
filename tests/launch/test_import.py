"""What importing the package brings with it, each in a fresh interpreter."""

from __future__ import annotations

import sys

import pytest

from tests.launch.test_launchers import run_all


def run(code: str) -> str:
    (output,) = run_all([sys.executable, "-c", code])
    return output


def test_importing_needs_no_optional_dependency_and_says_nothing() -> None:
    # Lightning first: where they are installed, it imports some of them itself.
    code = """
import sys, lightning.pytorch
for name in ("transformers", "safetensors", "matplotlib", "triton", "deep_ep", "transformer_engine"):
    sys.modules[name] = None
import lightning_ep
from lightning.pytorch.strategies import StrategyRegistry
assert "ep_overlap" in StrategyRegistry
lightning_ep.EPOverlapStrategy()
"""
    assert run(code) == ""


def test_nothing_but_greenlet_comes_on_top_of_lightning() -> None:
    code = """
import sys, lightning.pytorch
known = {m.split(".")[0] for m in sys.modules} | sys.stdlib_module_names
import lightning_ep
print(*sorted({m.split(".")[0] for m in sys.modules} - known))
"""
    assert run(code) == "greenlet lightning_ep\n"


def test_the_commands_help_does_not_wait_for_lightning() -> None:
    code = """
import sys
sys.argv = ["/somewhere/bin/lightning-ep", "--help"]
from lightning_ep.cli import main
assert main() == 0
assert not {"torch", "lightning"} & set(sys.modules)
"""
    assert run(code).startswith("usage: lightning-ep COMMAND")


@pytest.mark.parametrize("program", ["lightning-ep", "train.py", "lightning_ep"])
def test_the_strategy_is_there_whatever_the_program_is_called(program: str) -> None:
    code = f"""
import sys
sys.argv = [{program!r}]
from lightning_ep import EPOverlapStrategy, strategy
from lightning.pytorch.strategies import StrategyRegistry
assert EPOverlapStrategy is strategy.EPOverlapStrategy and "ep_overlap" in StrategyRegistry
"""
    assert run(code) == ""
