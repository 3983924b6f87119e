"""Overlap seen from the host, for machines without GPU kernels: what lay between an exchange's launch and its wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_ep.profiling.intervals import Intervals, measure

SOURCE = "host: launch-to-wait intervals of exchanges (no GPU kernels here)"


class HostExchanges:
    """Collects exchanges while it is active; an observer of `lightning_ep.dispatch.base`.

    From a launch to the beginning of its wait the host did other work: that much communication could hide. The wait
    itself is exposed. Unlike kernel intervals, this counts an exchange as under way until it is waited for.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, float, float, float]] = []

    def __call__(self, leg: str, layer: int, launched: float, wait_began: float, wait_ended: float) -> None:
        self.rows.append((leg, layer, launched, wait_began, wait_ended))

    def start(self) -> None:
        from lightning_ep.dispatch.base import exchange_observers

        exchange_observers.append(self)

    def stop(self) -> None:
        from lightning_ep.dispatch.base import exchange_observers

        if self in exchange_observers:
            exchange_observers.remove(self)

    def report(self) -> dict[str, Any]:
        """As an overlap report, as far as the host can know: times in ms, breakdown by leg and by layer."""
        return self._times(self.rows) | {
            "exchange_count": len(self.rows),
            "ranges": self._breakdown(lambda row: f"ep/{row[0]}"),
            "layers": self._breakdown(lambda row: f"layer {row[1]}"),
        }

    def _breakdown(self, key) -> list[dict[str, Any]]:
        groups: dict[str, list] = {}
        for row in sorted(self.rows, key=lambda row: (row[1], row[0])):
            groups.setdefault(key(row), []).append(row)
        return [{"name": name, "exchange_count": len(rows)} | self._times(rows) for name, rows in groups.items()]

    @staticmethod
    def _times(rows: list) -> dict[str, Any]:
        times = np.array([row[2:] for row in rows], dtype=np.float64).reshape(-1, 3)
        times_ns: Intervals = np.rint((times - times.min(initial=0.0)) * 1e9).astype(np.int64)
        comm, hidden = measure(times_ns[:, [0, 2]]), measure(times_ns[:, [0, 1]])
        return {
            "comm_ms": comm / 1e6,
            "hidden_ms": hidden / 1e6,
            "exposed_ms": (comm - hidden) / 1e6,
            "hidden_fraction": hidden / comm if comm else None,
        }
