"""What a step took and was: time, tokens, FLOPs, memory; without making the host wait for the GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn


class StepClock:
    """Durations between ends of steps. On CUDA the ends are events on the current stream: the GPU's own times."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def tick(self) -> None:
        """A step ended."""
        now: Any
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = perf_counter()
        if self._last is not None:
            self._pairs.append((self._last, now))
        self._last = now

    def pause(self) -> None:
        """What follows is no step: the next tick only starts the clock again."""
        self._last = None

    def take(self, wait: bool = False) -> list[float]:
        """Seconds of the steps that are over, each handed out once; `wait`: also of those still on the GPU."""
        if self._cuda and wait and self._pairs:
            self._pairs[-1][1].synchronize()
        over = len(self._pairs)
        if self._cuda:
            over = next((i for i, (_, end) in enumerate(self._pairs) if not end.query()), over)
        taken, self._pairs = self._pairs[:over], self._pairs[over:]
        return [start.elapsed_time(end) / 1e3 if self._cuda else end - start for start, end in taken]


def tokens_of(batch: Any) -> tuple[int, int] | None:
    """(tokens, sequence length) of a batch, from the shape of its token ids: `input_ids`, else the first tensor of
    integers with at least two dimensions. None when there is none."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        candidates = [ids] if isinstance(ids, Tensor) else list(batch.values())
    elif isinstance(batch, Tensor):
        candidates = [batch]
    else:
        candidates = list(batch) if isinstance(batch, list | tuple) else []
    for tensor in candidates:
        if isinstance(tensor, Tensor) and tensor.dim() >= 2 and not tensor.is_floating_point():
            return tensor.numel(), tensor.shape[-1]
    return None


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on this rank's GPU; on CPU the process's largest size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def flops_of(module: nn.Module, sequence_length: int) -> float | None:
    """Training FLOPs of one token, from the first Hugging Face config inside; None where the formula does not apply."""
    from lightning_ep.bench.flops import flops_per_token

    for inner in module.modules():
        config = getattr(inner, "config", None)
        if hasattr(config, "num_hidden_layers"):
            try:
                return flops_per_token(config, sequence_length).training
            except (ValueError, AttributeError) as error:
                rank_zero_warn(f"no TFLOP/s: {error}")
                break
    return None
