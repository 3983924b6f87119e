"""Sharded save and load (placeholder until the full module lands in the next commit)."""

from __future__ import annotations

from typing import Any


def module_state(strategy: Any) -> dict[str, Any]:
    return strategy.lightning_module.state_dict()


def optimizer_state(strategy: Any, optimizer: Any) -> dict[str, Any]:
    return optimizer.state_dict()


def save(strategy: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
    raise NotImplementedError


def load(strategy: Any, path: Any, fitting: bool) -> dict[str, Any]:
    raise NotImplementedError
