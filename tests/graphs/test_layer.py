"""A recorded layer repeats the layer's own forward and backward."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from lightning_ep.experts.interface import find_experts
from lightning_ep.graphs.dense import DenseGraphs
from tests.graphs.tape import TapeRecorder
from tests.reference import tiny_model, tokens


def test_a_model_whose_layers_are_recorded_trains_alike() -> None:
    model, plain = (tiny_model("qwen3_moe", use_cache=False, output_router_logits=False) for _ in range(2))
    recorder = TapeRecorder()
    graphs = DenseGraphs(model.model, find_experts(model), recorder, nullcontext)
    for step in range(4):
        for one in (model, plain):
            one.zero_grad()
        for micro in range(3):
            ids = tokens(step, micro, 0)
            if micro == 0:
                graphs.record_wanted()
            losses = []
            for one in (model, plain):
                loss = one(input_ids=ids, labels=ids).loss
                loss.backward()
                losses.append(loss.detach())
            assert torch.equal(*losses), (step, micro)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), (step, name)
        with torch.no_grad():
            for one in (model, plain):
                for p in one.parameters():
                    p -= 0.1 * p.grad
    assert sum(tape.replays for tape in recorder.tapes) > 0
