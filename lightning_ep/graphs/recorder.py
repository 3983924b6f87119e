"""Recording kernels once and launching them all by one call: CUDA graphs, behind an interface that tests can fake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Recording(Protocol):
    """Kernels with the addresses that they read and write."""

    def replay(self) -> None:
        """Launch them on the current stream."""


class Recorder(Protocol):
    """Makes recordings."""

    def new_pool(self) -> Any:
        """Memory of its own for recordings that never run at the same time as others with the same pool."""

    def record(self, pool: Any) -> AbstractContextManager[Recording]:
        """Record what is launched inside, which need not run; new tensors come from `pool` and stay where they are."""


class CudaRecorder:
    """CUDA graphs of one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def record(self, pool: Any) -> Iterator[Recording]:
        # Not torch.cuda.graph(), which empties the allocator's cache before each of the many.
        graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            # NCCL's own threads ask for events meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()
        outside.wait_stream(self._stream)
