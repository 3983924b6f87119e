"""Facts about who writes a fit's checkpoints, and where to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from lightning_ep.storage import is_remote


def checkpoint_facts(trainer: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """`checkpoint_io` and `checkpoint_dir` of a `lightning.pytorch.Trainer` as far as there are any, with origins."""
    facts: dict[str, Any] = {}
    origins: dict[str, str] = {}
    plugin = getattr(trainer.strategy, "_checkpoint_io", None)
    if plugin is not None and type(plugin) is not TorchCheckpointIO:
        facts["checkpoint_io"], origins["checkpoint_io"] = type(plugin).__name__, "in plugins of the Trainer"
    if trainer.state.fn in (None, TrainerFn.FITTING):
        logger = trainer.logger
        # Where Lightning puts checkpoints of a callback without dirpath.
        implied = (trainer.default_root_dir, "default_root_dir of the Trainer")
        # The default logger only hands default_root_dir on.
        if logger is not None and logger.save_dir not in (None, trainer.default_root_dir):
            implied = (logger.save_dir, f"save_dir of {type(logger).__name__}")
        directories = [
            (callback.dirpath, f"dirpath of {type(callback).__name__}")
            if getattr(callback, "dirpath", None)
            else implied
            for callback in trainer.checkpoint_callbacks
        ]
        if chosen := one_directory(directories):
            facts["checkpoint_dir"], origins["checkpoint_dir"] = chosen
    return facts, origins


def one_directory(directories: Iterable[tuple[Any, str]]) -> tuple[str, str] | None:
    """Of (directory, origin) pairs one that cannot be written to, else the first; None when nothing is written."""
    pairs = [(str(path), origin) for path, origin in directories if path]
    return min(pairs, key=lambda pair: not is_remote(pair[0]), default=None)
