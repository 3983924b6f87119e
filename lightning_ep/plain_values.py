"""What can be saved so that loading it executes no code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from lightning_ep.storage import safe_globals

_NOTHING = object()


def plain(value: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(what `torch.load(weights_only=True)` will load of `value`, the paths of what had to be left out).

    Paths, enums and subclasses of dict and list become strings, their values, dicts and lists.
    """
    lost: list[str] = []
    return _plain(value, "", lost), lost


def _plain(value: Any, path: str, lost: list[str]) -> Any:
    if _loads(value):
        return value
    if isinstance(value, Mapping):
        items = {}
        for k, v in value.items():
            inner = f"{path}.{k}" if path else str(k)
            if not _loads(k):
                lost.append(inner)
            elif (kept := _plain(v, inner, lost)) is not _NOTHING:
                items[k] = kept
        return items
    if isinstance(value, list | tuple):
        items = [_plain(v, f"{path}[{i}]", lost) for i, v in enumerate(value)]
        items = [None if v is _NOTHING else v for v in items]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Enum):
        return _plain(value.value, path, lost)
    if isinstance(value, PurePath):
        return str(value)
    lost.append(path)
    return _NOTHING


def _loads(value: Any) -> bool:
    """Whether it survives: the loader itself is asked."""
    if isinstance(value, nn.Module):  # would pickle, at length
        return False
    try:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        with torch.serialization.safe_globals(safe_globals()):
            torch.load(file, weights_only=True)
    except Exception:
        return False
    return True
