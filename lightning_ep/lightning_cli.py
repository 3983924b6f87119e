"""`lightning-ep fit|test|predict --config x.yaml [--trainer.max_steps=10 ...]`: LightningCLI that knows this package.

`trainer.strategy` may be the name `ep_overlap`, or a class path with arguments:

    trainer:
      strategy:
        class_path: lightning_ep.EPOverlapStrategy
        init_args: {expert_model_parallel_size: 8}

`lightning-ep validate` is not LightningCLI's validation loop; it checks a config without training.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lightning_ep import recipes  # noqa: F401  so that their bare class names work in configs
from lightning_ep.config_file import read_config
from lightning_ep.flex import both_overridden, settle_dispatcher
from lightning_ep.rule import ConfigurationError
from lightning_ep.strategy import EPOverlapStrategy


class SaveConfigBesideLogs(SaveConfigCallback):
    """Saves the whole config into the logger's folder; without a logger it would land on a file of the user's."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


class EPLightningCLI(LightningCLI):
    """LightningCLI for any LightningModule and data module, given by class path or name.

    Args:
        argv: the command line after the program's name.
        kwargs: LightningCLI's own.
    """

    def __init__(self, argv: list[str], **kwargs: Any) -> None:
        self.argv = argv
        # Left to itself LightningCLI reads sys.argv, which the processes that Lightning starts get too.
        args = None if argv == sys.argv[1:] else argv
        super().__init__(args=args, save_config_callback=SaveConfigBesideLogs, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        known = LightningCLI.subcommands()
        return {name: known[name] for name in ("fit", "test", "predict")}

    def before_instantiate_classes(self) -> None:
        trainer = self._get(self.config, "trainer")
        strategy = trainer.strategy
        if isinstance(strategy, str) and strategy.rpartition(".")[2] == EPOverlapStrategy.__name__:
            # A class path without arguments is a mere string to the parser, and Lightning knows names alone.
            trainer.strategy = EPOverlapStrategy.strategy_name
        arguments: Any = getattr(strategy, "init_args", None)
        if arguments is not None and both_overridden(self.argv):
            kind, backend, note = settle_dispatcher(
                arguments.moe_token_dispatcher_type, arguments.moe_flex_dispatcher_backend
            )
            arguments.moe_token_dispatcher_type, arguments.moe_flex_dispatcher_backend = kind, backend
            if note:
                rank_zero_info(note)


def main(argv: list[str]) -> int:
    """Run a subcommand; returns the exit code. A configuration that cannot train is a message, not a traceback."""
    # A console script has the folder of the script on its path, not the one where the user's model lies.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        EPLightningCLI(argv, save_config_kwargs={"overwrite": True})
    except ConfigurationError as error:
        rank_zero_only(print)(error.located(_origins(argv)), file=sys.stderr)
        return 1
    return 0


def _origins(argv: list[str]) -> dict[str, str]:
    """Where each argument was written: file and key, or the command line."""
    origins: dict[str, str] = {}
    for i, argument in enumerate(argv):
        key, separator, value = argument.partition("=")
        if key in ("-c", "--config"):
            path = value if separator else argv[i + 1]
            origins |= read_config(path).origins
        elif key.startswith("--trainer."):
            origins[key.rpartition(".")[2]] = f"command line: {key}"
    return origins
