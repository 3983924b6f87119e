"""The emulated fabric: one process plays rank 0 of N, on one GPU, so that anyone can see what overlap would give.

The peers are taken to route as this rank does: what arrives from rank r looks like what was sent to rank r. So an
exchange is a local copy, plus the occupancy of the communication stream that the real one would have, on a few
multiprocessors: bytes that leave the rank / bandwidth + latency. The schedule, the kernels beside it and the host's
waits are real; only the wire is emulated, and whatever is printed from it says so.

(The numbers are those of a model in which expert e shares its weights with all experts e + i L: the peers' experts are
this rank's own. That makes losses and gradients testable.)
"""

from __future__ import annotations

import torch
from torch import Tensor


class EmulatedFabric:
    """The wire of the cluster that is played; a `Transport` for `AllToAllDispatcher`.

    Args:
        size: ranks of the EP group; this process is its rank 0.
        bandwidth: bytes a second that leave a rank during an exchange (a 400 Gb/s NIC: 50e9).
        latency: seconds an exchange costs beside its bytes.
        num_sms: multiprocessors that the exchange's kernel occupies.
    """

    rank = 0

    def __init__(self, size: int, bandwidth: float, latency: float, num_sms: int = 8) -> None:
        self.size, self.bandwidth, self.latency, self.num_sms = size, bandwidth, latency, num_sms
        self._stream: torch.cuda.Stream | None = None

    def seconds(self, num_bytes: int) -> float:
        """How long an exchange that sends `num_bytes` to other ranks occupies the wire."""
        return num_bytes / self.bandwidth + self.latency

    def stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        return self._stream

    def all_to_all(
        self, out: Tensor, inp: Tensor, out_splits: list[int] | None = None, in_splits: list[int] | None = None
    ) -> EmulatedWork:
        assert out_splits == in_splits, "the peers send what this rank sends"
        num_bytes = inp.nbytes
        if in_splits is None:  # of an even exchange a share stays at home
            num_bytes = num_bytes * (self.size - 1) // self.size
        return EmulatedWork(self, out, inp, num_bytes)

    def close(self) -> None:
        self._stream = None


class EmulatedWork:
    """An exchange under way; the tensors stay alive until it is waited for."""

    def __init__(self, fabric: EmulatedFabric, out: Tensor, inp: Tensor, num_bytes: int) -> None:
        self._tensors: tuple[Tensor, ...] = (out, inp)
        self._done: torch.cuda.Event | None = None
        if not out.is_cuda:
            out.copy_(inp)
            return
        from lightning_ep.dispatch.emulated_kernel import copy_for

        stream = fabric.stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy_for(out, inp, fabric.seconds(num_bytes), fabric.num_sms)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._tensors = ()
