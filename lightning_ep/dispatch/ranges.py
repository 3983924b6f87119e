"""Named ranges for profilers: `ep/dispatch/3` is the dispatch of the third MoE layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def annotate(name: str, layer: int) -> AbstractContextManager:
    """A range seen by the PyTorch profiler, and by Nsight Systems under `emit_nvtx`; nothing when none is on."""
    # A process-wide flag: the parked backward runs in a thread of its own, where the profiler does not look unless it
    # was told to (`_ExperimentalConfig(profile_all_threads=True)`, as OverlapMetrics does).
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(f"{name}/{layer}")
    return _NOTHING
