"""The conformance suite on the CPU: every dispatcher over gloo, DeepEP and HybridEP over a model of their libraries."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.dispatch import fake_deep_ep
from tests.dispatch.conformance import OPTIONS, ROUTINGS, TOLERANCE, errors_of, poisoned_memory, wrong
from tests.distributed import run_distributed
from tests.experts.spread import make_mesh

# name -> options, version of the library that is modelled, dtype, EP size
DISPATCHERS = {
    "in process": ({}, None, torch.float32, 1),
    "alltoall": (OPTIONS["alltoall"], None, torch.float32, 2),
    "alltoall, bfloat16": (OPTIONS["alltoall"], None, torch.bfloat16, 2),
    "alltoall without dedup": (OPTIONS["alltoall without dedup"], None, torch.float32, 2),
    "deepep 1.2": (OPTIONS["deepep"], "1.2", torch.bfloat16, 2),
    "deepep 2.1": (OPTIONS["deepep"], "2.1", torch.bfloat16, 2),
    "hybridep": (OPTIONS["hybridep"], "hybrid-ep", torch.bfloat16, 2),
}


def errors_of_all(dispatcher: str) -> dict[str, dict[str, float]]:
    options, version, dtype, ep_size = DISPATCHERS[dispatcher]
    mesh = make_mesh(ep_size)
    found = {}
    with fake_deep_ep.installed(version) if version else nullcontext(), poisoned_memory():
        for name, routing in ROUTINGS.items():
            found[name] = errors_of(routing, mesh, 32, 24, dtype, torch.device("cpu"), **options)
    return found


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_outputs_and_gradients(dispatcher: str) -> None:
    dtype = DISPATCHERS[dispatcher][2]
    for rank, found in enumerate(run_distributed(errors_of_all, 2, dispatcher)):
        assert found.keys() == ROUTINGS.keys() and TOLERANCE[dtype] < 0.1
        failures = {name: bad for name, errors in found.items() if (bad := wrong(errors, dtype))}
        assert not failures, f"rank {rank}: {failures}"
