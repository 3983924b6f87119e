"""The handshake: before ranks exchange anything that could hang, they compare what must be the same on all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_ep.guards.agreement import SideGroup
from lightning_ep.guards.failure import naming

# At most so many differences in one message.
_SHOWN = 8


class MismatchError(ValueError):
    """Ranks were started with different code, options or models."""


def compare(side: SideGroup, facts: Mapping[str, Any], what: str) -> None:
    """Raise MismatchError on all ranks when `facts` differ between them, naming each fact and who has which value.

    Collective. Facts travel whole only when their digests differ.
    """
    own = {name: str(value) for name, value in facts.items()}
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
    if len(set(side.gather(digest))) == 1:
        return
    all_facts = side.gather(own)
    names = list(dict.fromkeys(name for ranks_facts in all_facts for name in ranks_facts))
    lines = [line for name in names if (line := _difference(name, [f.get(name) for f in all_facts]))]
    shown = lines[:_SHOWN] + ([f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])
    raise MismatchError("\n  ".join([f"ranks differ in their {what}; start all of them alike:", *shown]))


def _difference(name: str, values: list[str | None]) -> str | None:
    if len(set(values)) == 1:
        return None
    ranks: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return f"{name}: " + ", ".join(
        f"{'nothing' if value is None else value} on {naming(who)}" for value, who in ranks.items()
    )


def run_facts(trainer: pl.Trainer) -> dict[str, Any]:
    """Versions, this package's code, and what of the trainer decides when ranks meet."""
    names = (
        "precision", "accumulate_grad_batches", "max_epochs", "max_steps", "min_epochs", "min_steps",
        "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches",
        "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "gradient_clip_val",
        "gradient_clip_algorithm", "reload_dataloaders_every_n_epochs",
    )  # fmt: skip
    return {
        "call": trainer.state.fn,
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "transformers": _version("transformers"),
        "lightning_ep's code": code_digest(),
        "module": type(trainer.lightning_module).__qualname__,
        **{f"Trainer({name})": getattr(trainer, name, None) for name in names},
    }


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Names, shapes and dtypes of everything that is reduced or broadcast."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}{_frozen(t)}" for name, t in tensors}


def _frozen(tensor: torch.Tensor) -> str:
    return " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def code_digest() -> str:
    """A short digest of this package's source: nodes may hold other states of the same version."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
