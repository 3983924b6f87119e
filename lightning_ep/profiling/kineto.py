"""Reads PyTorch profiler (Kineto) Chrome traces, plain or gzip."""

from __future__ import annotations

from array import array
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ep.profiling.attribution import Launches, RawTrace, Spans, known_span
from lightning_ep.profiling.json_events import ChromeTrace

# Kineto's categories, new and old spelling.
_KERNEL = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})
_HOST_SPAN = frozenset({"user_annotation", "cpu_op"})
_GPU_SPAN = "gpu_user_annotation"


class _Rows:
    """Growing rows of int64; smaller than rows of Python objects by a factor of ten."""

    def __init__(self, width: int) -> None:
        self.width, self.values = width, array("q")

    def columns(self) -> list[np.ndarray]:
        rows = np.frombuffer(self.values, dtype=np.int64) if self.values else np.empty(0, np.int64)
        return [np.ascontiguousarray(column) for column in rows.reshape(-1, self.width).T]


class _Names:
    """Gives each distinct text a number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def read_kineto(path: str | Path) -> RawTrace:
    """The GPU activities, launches and ranges of a Kineto trace.

    Raises:
        ValueError: malformed or truncated JSON, an event without usable times (its number is named), or no GPU
            activity at all.
    """
    trace = ChromeTrace(path)
    kernels, launches, host, gpu = _Rows(6), _Rows(3), _Rows(4), _Rows(4)
    kernel_name, span_name = _Names(), _Names()
    for event in trace:
        if event.get("ph") != "X":
            continue
        category = event.get("cat")
        try:
            if category in _LAUNCH:
                # Only calls with a correlation id can be told to have launched something.
                if (correlation := event.get("args", {}).get("correlation")) is not None:
                    launches.values.extend((int(correlation), _lane(event.get("tid")), _ns(event["ts"])))
            elif category in _KERNEL:
                args = event.get("args", {})
                stream, device = args.get("stream", event.get("tid", 0)), args.get("device", event.get("pid", 0))
                start = _ns(event["ts"])
                end = start + max(_ns(event.get("dur", 0)), 0)
                correlation = int(args.get("correlation", -1))
                name = kernel_name(str(event.get("name", "")))
                kernels.values.extend((name, _lane(device), _lane(stream), correlation, start, end))
            elif (category in _HOST_SPAN or category == _GPU_SPAN) and (name := known_span(event.get("name"))):
                start = _ns(event["ts"])
                end = start + max(_ns(event.get("dur", 0)), 0)
                spans = gpu if category == _GPU_SPAN else host
                spans.values.extend((span_name(name), _lane(event.get("tid")), start, end))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, InvalidOperation) as error:
            raise ValueError(f"{trace.path}: event {trace.count} ({category}) is unusable: {error!r}") from error
    name_N, device_N, stream_N, correlation_N, start_N, end_N = kernels.columns()
    if not len(name_N):
        raise ValueError(
            f"{trace.path}: {trace.count} events, but no GPU kernel among them; profile with ProfilerActivity.CUDA"
        )
    correlation_C, thread_C, time_C = launches.columns()
    return RawTrace(
        source=trace.path.name,
        rank=_rank(trace.metadata),
        names=list(kernel_name.numbers),
        name_N=name_N,
        process_N=np.zeros_like(name_N),
        device_N=device_N,
        stream_N=stream_N,
        correlation_N=correlation_N,
        start_N=start_N,
        end_N=end_N,
        launches=Launches(np.zeros_like(correlation_C), correlation_C, thread_C, time_C),
        host_spans=Spans(list(span_name.numbers), *host.columns()),
        gpu_spans=Spans(list(span_name.numbers), *gpu.columns()),
    )


def _ns(microseconds: Any) -> int:
    """Microseconds (an int, or a number with a fraction as text) in whole nanoseconds, without a float's rounding."""
    if type(microseconds) is int:
        return microseconds * 1000
    if type(microseconds) is not str:
        raise TypeError(f"{microseconds!r} is not a time")
    whole, _, fraction = microseconds.partition(".")
    if len(fraction) == 3 and fraction.isdigit() and not whole.startswith("-"):  # what Kineto writes
        return int(whole) * 1000 + int(fraction)
    return round(Decimal(microseconds) * 1000)


def _lane(identity: Any) -> int:
    """A thread, stream or device id as a number; traces write them as numbers or as text ending in one."""
    if type(identity) is int:
        return identity
    digits = str(identity).rpartition(" ")[2]
    return int(digits) if digits.isdigit() else -1


def _rank(metadata: dict[str, Any]) -> int | None:
    distributed = metadata.get("distributedInfo")
    rank = distributed.get("rank") if isinstance(distributed, dict) else None
    return rank if isinstance(rank, int) else None
