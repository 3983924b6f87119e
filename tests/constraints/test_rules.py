"""Each rule violated alone, satisfied at its boundary, silent over unknown facts; and all of them in one error."""

from __future__ import annotations

import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_ep.config import EPConfig
from lightning_ep.constraints import RULES, ConfigurationError, check, enforce
from lightning_ep.facts import ABSENT, FACT_NAMES, Facts
from lightning_ep.troubleshooting import NOTES, page

# Everything known, everything allowed: 24 H100s in three nodes.
GOOD = Facts(
    expert_model_parallel_size=8,
    overlap_moe_expert_parallel_comm=True,
    num_moe_experts=64,
    recomputed_layers=0,
    mtp_num_layers=1,
    add_bias_linear=False,
    add_qkv_bias=False,
    precision="bf16-mixed",
    accumulate_grad_batches=8,
    batch_size=1,
    tokens_per_rank=4096,
    world_size=24,
    num_nodes=3,
    accelerator="cuda",
    torch_version="2.6.0",
    te_version="2.12.0",
    deep_ep_version="1.2.1",
    hybrid_ep_version="1.2.1",
    gpu_name="NVIDIA H100 80GB HBM3",
    gpu_capability=(9, 0),
    cuda_device_max_connections=32,
)
OBSERVED = set(FACT_NAMES) - {f.name for f in fields(EPConfig)}
TE = {"experts_implementation": "transformer_engine"}
WGRAD = {"delay_wgrad_compute": True}
GRAPH = ("no-cuda-graphs",)


class Case(NamedTuple):
    broken: dict[str, Any]
    kept: tuple[dict[str, Any], ...]  # at the boundary: the rule holds
    company: tuple[str, ...] = ()  # rules that cannot but be violated too


def flex(backend: str | None, **others: Any) -> dict[str, Any]:
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend} | others


CASES = {
    "overlap-needs-ep": Case({"expert_model_parallel_size": 1}, ({"expert_model_parallel_size": 2},)),
    "overlap-needs-experts": Case({"num_moe_experts": 1}, ({"num_moe_experts": 2},), ("experts-divisible",)),
    "experts-divisible": Case({"num_moe_experts": 60}, ({"num_moe_experts": 8}, {"num_moe_experts": 16})),
    "world-divisible": Case({"world_size": 28}, ({"world_size": 8}, {"world_size": 16})),
    "overlap-dispatcher": Case(
        {"moe_token_dispatcher_type": "allgather"}, ({"moe_token_dispatcher_type": "alltoall"}, flex("deepep"))
    ),
    "overlap-precision": Case(
        {"precision": "32-true"},
        tuple({"precision": p} for p in ("bf16-mixed", "bf16-true", "16-mixed", "16-true", "bf16", "16")),
    ),
    "overlap-precision-cpu": Case(
        {"precision": "32-true", "accelerator": "cpu"}, ({"precision": "bf16-mixed", "accelerator": "cpu"},)
    ),
    "overlap-torch-version": Case(
        {"torch_version": "2.5.1"}, ({"torch_version": "2.6.0"}, {"torch_version": "2.6.0a0+nv25.1"})
    ),
    "overlap-pipeline-needs-virtual": Case(
        {"pipeline_model_parallel_size": 2},
        ({"pipeline_model_parallel_size": 1},)
        + ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1},),
        ("no-pipeline-parallelism",),
    ),
    "overlap-full-recompute": Case(
        {"recompute_granularity": "full", "recomputed_layers": 4},
        ({"recompute_granularity": "selective"}, {"recompute_granularity": None}),
    ),
    "overlap-recompute-method": Case(
        {"recompute_method": "uniform"}, ({"recompute_method": None},), ("recompute-is-the-models",)
    ),
    "overlap-recompute-num-layers": Case(
        {"recompute_num_layers": 1}, ({"recompute_num_layers": None},), ("recompute-is-the-models",)
    ),
    "overlap-recompute-moe": Case(
        {"recompute_modules": ("core_attn", "moe")},
        ({"recompute_modules": ("core_attn",)}, {"recompute_modules": ("moe_act",)}),
        ("recompute-is-the-models",),
    ),
    "overlap-shared-expert-overlap": Case({"moe_shared_expert_overlap": True}, ({"moe_shared_expert_overlap": False},)),
    "overlap-mtp-layers": Case({"mtp_num_layers": 2}, tuple({"mtp_num_layers": n} for n in (None, 0, 1))),
    "overlap-cuda-graph-moe": Case(
        {"cuda_graph_scope": ("mlp",)}, ({"cuda_graph_scope": ("moe_router",)}, {"cuda_graph_scope": ()}), GRAPH
    ),
    "overlap-nothing-to-overlap": Case(
        {"accumulate_grad_batches": 1, "batch_size": 1},
        ({"accumulate_grad_batches": 2, "batch_size": 1}, {"accumulate_grad_batches": 1, "batch_size": 2}),
        ("overlap-few-microbatches",),
    ),
    "overlap-one-connection": Case(
        {"cuda_device_max_connections": 1},
        ({"cuda_device_max_connections": 2},)
        + ({"cuda_device_max_connections": 1, "gpu_capability": (10, 0), "gpu_name": "NVIDIA B200"},),
    ),
    "overlap-small-ep": Case(
        {"expert_model_parallel_size": 4, "num_nodes": 2},
        ({"expert_model_parallel_size": 8, "num_nodes": 2}, {"expert_model_parallel_size": 4, "num_nodes": 3})
        + (flex("deepep", expert_model_parallel_size=4, num_nodes=2),),
    ),
    "overlap-few-microbatches": Case({"accumulate_grad_batches": 3}, ({"accumulate_grad_batches": 4},)),
    "wgrad-needs-overlap": Case(WGRAD | {"overlap_moe_expert_parallel_comm": False}, (WGRAD,)),
    "wgrad-excludes-dispatch-backward": Case(
        WGRAD | {"overlap_dispatch_backward_with_experts_wgrad": True},
        (WGRAD,),
        ("dispatch-backward-excludes-overlap",),
    ),
    "dispatch-backward-excludes-overlap": Case(
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        ({"overlap_dispatch_backward_with_experts_wgrad": True, "overlap_moe_expert_parallel_comm": False},),
    ),
    "dispatch-backward-te-version": Case(
        TE
        | {"overlap_dispatch_backward_with_experts_wgrad": True, "overlap_moe_expert_parallel_comm": False}
        | {"te_version": "2.2.0"},
        (
            TE
            | {"overlap_dispatch_backward_with_experts_wgrad": True, "overlap_moe_expert_parallel_comm": False}
            | {"te_version": "2.3.0"},
        ),
    ),
    "wgrad-grad-reduce-te-version": Case(
        WGRAD | TE | {"overlap_grad_reduce": True, "te_version": "2.6.0"},
        (
            WGRAD | TE | {"overlap_grad_reduce": True, "te_version": "2.7.0"},
            WGRAD | {"overlap_grad_reduce": True, "te_version": "2.6.0"},
            WGRAD | TE | {"te_version": "2.6.0"},
        ),
    ),
    "wgrad-fusion-te-version": Case(
        WGRAD | TE | {"gradient_accumulation_fusion": True, "te_version": "2.6.0"},
        (
            WGRAD | TE | {"gradient_accumulation_fusion": True, "te_version": "2.7.0"},
            WGRAD | {"gradient_accumulation_fusion": True, "te_version": "2.6.0"},
        ),
    ),
    "wgrad-cuda-graph-te-version": Case(
        WGRAD | TE | {"cuda_graph_scope": ("moe_preprocess",), "te_version": "2.9.0"},
        (
            WGRAD | TE | {"cuda_graph_scope": ("moe_preprocess",), "te_version": "2.10.0"},
            WGRAD | {"cuda_graph_scope": ("moe_preprocess",), "te_version": "2.9.0"},
        ),
        GRAPH,
    ),
    "wgrad-in-graph-te-version": Case(
        WGRAD | {"cuda_graph_scope": ("attn",), "gradient_accumulation_fusion": True, "te_version": "2.11.0"},
        (
            WGRAD | {"cuda_graph_scope": ("attn",), "gradient_accumulation_fusion": True, "te_version": "2.12.0"},
            # Without a shared expert the router's graph holds no delayed weight gradient.
            WGRAD | {"cuda_graph_scope": ("moe_router",), "te_version": "2.11.0"},
        ),
        GRAPH,
    ),
    "wgrad-in-graph-fusion": Case(
        WGRAD | {"cuda_graph_scope": ("moe_router",), "moe_shared_expert_intermediate_size": 512},
        (
            WGRAD
            | {"cuda_graph_scope": ("moe_router",), "moe_shared_expert_intermediate_size": 512}
            | {"gradient_accumulation_fusion": True},
            WGRAD
            | {"cuda_graph_scope": ("moe_router",), "moe_shared_expert_intermediate_size": 512}
            | {"moe_shared_expert_overlap": True},
        ),
        GRAPH,
    ),
    "wgrad-in-graph-bias": Case(
        WGRAD | {"cuda_graph_scope": ("attn",), "gradient_accumulation_fusion": True, "add_qkv_bias": True},
        (
            WGRAD | {"cuda_graph_scope": ("attn",), "gradient_accumulation_fusion": True},
            WGRAD | {"cuda_graph_scope": ("moe_router",), "add_qkv_bias": True},
        ),
        GRAPH,
    ),
    "flex-needs-backend": Case(flex(None), (flex("deepep"), flex("hybridep"))),
    "backend-not-active": Case({"moe_flex_dispatcher_backend": "deepep"}, (flex("deepep"),)),
    "hybridep-token-limit": Case(
        flex("hybridep", tokens_per_rank=21_845, expert_model_parallel_size=16, world_size=48, num_nodes=6),
        (
            flex("hybridep", tokens_per_rank=21_844, expert_model_parallel_size=16, world_size=48, num_nodes=6),
            # One node an expert-parallel group: no network, no limit.
            flex("hybridep", tokens_per_rank=21_845, expert_model_parallel_size=8, world_size=48, num_nodes=6),
            flex("deepep", tokens_per_rank=21_845, expert_model_parallel_size=16, world_size=48, num_nodes=6),
        ),
    ),
    "deepep-gpu": Case(
        flex("deepep", gpu_name="NVIDIA GB200", gpu_capability=(10, 0)),
        (
            flex("deepep", gpu_name="NVIDIA B200", gpu_capability=(10, 0)),
            flex("deepep", gpu_name="NVIDIA A100-SXM4-80GB", gpu_capability=(8, 0)),
            flex("hybridep", gpu_name="NVIDIA GB200", gpu_capability=(10, 0)),
        ),
    ),
    "hybridep-gpu": Case(
        flex("hybridep", gpu_name="Tesla V100-SXM2-16GB", gpu_capability=(7, 0)),
        (
            flex("hybridep", gpu_name="NVIDIA A100-SXM4-80GB", gpu_capability=(8, 0)),
            flex("hybridep", gpu_name="NVIDIA GB300", gpu_capability=(10, 3)),
        ),
    ),
    "flex-needs-gpu": Case(flex("deepep", accelerator="cpu"), (flex("deepep", accelerator="cuda"),)),
    "deepep-missing": Case(
        flex("deepep", deep_ep_version=ABSENT), (flex("deepep", deep_ep_version="1.2.1"), {"deep_ep_version": ABSENT})
    ),
    "hybridep-missing": Case(
        flex("hybridep", hybrid_ep_version=ABSENT), (flex("deepep", hybrid_ep_version=ABSENT), flex("hybridep"))
    ),
    "te-missing": Case(TE | {"te_version": ABSENT}, (TE | {"te_version": "2.7.0"}, {"te_version": ABSENT})),
    "no-other-dispatchers": Case(
        {"moe_token_dispatcher_type": "allgather", "overlap_moe_expert_parallel_comm": False},
        ({"moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": False},),
    ),
    "no-shared-expert-overlap": Case(
        {"moe_shared_expert_overlap": True, "overlap_moe_expert_parallel_comm": False},
        ({"moe_shared_expert_overlap": False, "overlap_moe_expert_parallel_comm": False},),
    ),
    "recompute-is-the-models": Case({"recompute_granularity": "selective"}, ({"recompute_granularity": None},)),
    "no-pipeline-parallelism": Case(
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        ({"pipeline_model_parallel_size": 1},),
    ),
    "no-tensor-parallelism": Case({"tensor_model_parallel_size": 2}, ({"tensor_model_parallel_size": 1},)),
    "no-cuda-graphs": Case({"cuda_graph_scope": ("attn",)}, ({"cuda_graph_scope": ()},)),
}


def ids(facts: Facts) -> list[str]:
    return [found.id for found in check(facts)]


def test_the_table_is_covered() -> None:
    assert [rule.id for rule in RULES] == list(CASES)
    assert ids(GOOD) == []


@pytest.mark.parametrize("identifier", CASES)
def test_violated_alone(identifier: str) -> None:
    case = CASES[identifier]
    assert set(ids(replace(GOOD, **case.broken))) == {identifier, *case.company}


@pytest.mark.parametrize(("identifier", "index"), [(i, n) for i, case in CASES.items() for n in range(len(case.kept))])
def test_satisfied_at_the_boundary(identifier: str, index: int) -> None:
    assert identifier not in ids(replace(GOOD, **CASES[identifier].kept[index]))


@pytest.mark.parametrize("identifier", [i for i, case in CASES.items() if OBSERVED & case.broken.keys()])
def test_unknown_facts_violate_nothing(identifier: str) -> None:
    unknown = {name: None for name in OBSERVED & CASES[identifier].broken.keys()}
    if "gpu_capability" in unknown or identifier == "overlap-one-connection":
        unknown |= {"gpu_capability": None, "gpu_name": None}
    facts = replace(GOOD, **CASES[identifier].broken)
    if identifier == "overlap-full-recompute":  # "full" is an option; only its finding in the model is an observation
        assert identifier in ids(replace(facts, **unknown))
    else:
        assert identifier not in ids(replace(facts, **unknown))


def test_rows_are_whole() -> None:
    for rule in RULES:
        assert rule.arguments and set(rule.arguments) <= set(FACT_NAMES), rule.id
        assert all((rule.symptom, rule.cause, rule.fix, rule.source)), rule.id
        assert re.fullmatch(r"[a-z0-9-]+", rule.id)
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [("bf16-mixed", True), ("bf16-true", True), ("16-mixed", True), ("16-true", True), ("transformer-engine", True)]
    + [("32-true", False), ("64-true", False), ("32", False)],
)
def test_precisions(precision: str, allowed: bool) -> None:
    assert ("overlap-precision" not in ids(replace(GOOD, precision=precision))) == allowed


@pytest.mark.parametrize(
    ("schedule", "accumulation", "batch", "warned"),
    [("auto", 1, 1, True), ("auto", 2, 1, False), ("auto", 1, 2, False), ("auto", 1, None, False)]
    + [("1f1b", 1, 8, True), ("1f1b", 2, 1, False), ("two_batch", 8, 1, True), ("two_batch", 1, 2, False)],
)
def test_nothing_to_overlap(schedule: str, accumulation: int, batch: int | None, warned: bool) -> None:
    facts = replace(GOOD, overlap_schedule=schedule, accumulate_grad_batches=accumulation, batch_size=batch)
    assert ("overlap-nothing-to-overlap" in ids(facts)) == warned


# Some rules exclude each other (with overlap and without, flex and alltoall), so "all at once" takes several runs.
EVERYTHING = (
    dict(
        expert_model_parallel_size=3,
        overlap_moe_expert_parallel_comm=True,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="hybridep",
        delay_wgrad_compute=True,
        overlap_dispatch_backward_with_experts_wgrad=True,
        overlap_grad_reduce=True,
        moe_shared_expert_overlap=True,
        experts_implementation="transformer_engine",
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=2,
        recompute_modules=("moe",),
        recomputed_layers=0,
        pipeline_model_parallel_size=2,
        tensor_model_parallel_size=2,
        cuda_graph_scope=("attn", "moe"),
        num_moe_experts=1,
        mtp_num_layers=2,
        add_qkv_bias=True,
        precision="32-true",
        accumulate_grad_batches=1,
        batch_size=1,
        tokens_per_rank=30_000,
        world_size=4,
        num_nodes=2,
        torch_version="2.5.0",
        te_version=ABSENT,
        hybrid_ep_version=ABSENT,
        gpu_name="Tesla V100",
        gpu_capability=(7, 0),
        cuda_device_max_connections=1,
    ),
    dict(
        expert_model_parallel_size=1,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="deepep",
        gradient_accumulation_fusion=True,
        delay_wgrad_compute=True,
        experts_implementation="transformer_engine",
        te_version="2.2.0",
        deep_ep_version=ABSENT,
        gpu_name="Tesla V100",
        gpu_capability=(7, 0),
        accelerator="cpu",
        precision="32-true",
    ),
    dict(
        overlap_moe_expert_parallel_comm=False,
        delay_wgrad_compute=True,
        moe_shared_expert_overlap=True,
        moe_token_dispatcher_type="allgather",
    ),
    dict(expert_model_parallel_size=2, moe_flex_dispatcher_backend="deepep", num_nodes=1),
    dict(moe_token_dispatcher_type="allgather"),
    dict(moe_token_dispatcher_type="flex"),
)


def test_all_at_once() -> None:
    seen: set[str] = set()
    for broken in EVERYTHING:
        facts = replace(GOOD, **broken)
        expected = ids(facts)
        seen |= set(expected)
        if "error" in {found.severity for found in check(facts)}:
            with pytest.raises(ConfigurationError) as caught:
                enforce(facts)
            assert [found.id for found in caught.value.violations] == expected
            assert all(f"[{identifier}]" in str(caught.value) for identifier in expected)
    assert seen == set(CASES)
    assert len(ids(replace(GOOD, **EVERYTHING[0]))) >= 25


def test_the_message_names_argument_value_and_place() -> None:
    facts = replace(GOOD, num_moe_experts=60, origins={"num_moe_experts": "n_routed_experts of DeepseekV3Config"})
    with pytest.raises(ConfigurationError) as caught:
        enforce(facts)
    assert "num_moe_experts=60 (n_routed_experts of DeepseekV3Config), expert_model_parallel_size=8" in str(
        caught.value
    )
    located = caught.value.located({"expert_model_parallel_size": "run.yaml: trainer.strategy.init_args.x"})
    assert "expert_model_parallel_size=8 (run.yaml: trainer.strategy.init_args.x)" in str(located)
    assert "(n_routed_experts of DeepseekV3Config)" in str(located)


def test_errors_cross_process_boundaries() -> None:
    error = ConfigurationError(check(replace(GOOD, num_moe_experts=60)))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_warnings_do_not_stop() -> None:
    with pytest.warns(UserWarning, match=r"\[overlap-few-microbatches\].*accumulate_grad_batches=2"):
        enforce(replace(GOOD, accumulate_grad_batches=2))


def test_the_page_is_the_table() -> None:
    committed = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert committed.read_text() == page(), "run: python -m lightning_ep.troubleshooting > docs/troubleshooting.md"
    assert all(f"`{rule.id}`" in page() for rule in RULES)
    symptoms = " ".join(note.symptom for note in NOTES).lower()
    for trouble in ("does not rise with flex", "kernel times rises", "silently skipped", "training hangs"):
        assert trouble in symptoms


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"expert_model_parallel_size": 0}, "expert_model_parallel_size=0 is not a size"),
        ({"expert_model_parallel_size": True}, "expert_model_parallel_size=True is not a size"),
        ({"virtual_pipeline_model_parallel_size": 0}, "set it to an integer of at least 1"),
        ({"overlap_schedule": "sideways"}, "use one of 'auto', '1f1b', 'two_batch'"),
        ({"experts_implementation": "loops"}, "experts_implementation='loops'"),
        ({"moe_deepep_num_sms": 21}, "moe_deepep_num_sms=21 is odd"),
    ],
)
def test_values_that_mean_nothing(options: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fragment)):
        EPConfig(**options)


def test_all_meaningless_values_in_one_error() -> None:
    with pytest.raises(ValueError, match=r"overlap_schedule=.*; expert_model_parallel_size=0"):
        EPConfig(expert_model_parallel_size=0, overlap_schedule="sideways")  # type: ignore[arg-type]


def test_lists_come_in_every_form() -> None:
    assert EPConfig(cuda_graph_scope="attn").cuda_graph_scope == ("attn",)  # type: ignore[arg-type]
    assert EPConfig(recompute_modules=["moe", "attn"]).recompute_modules == ("moe", "attn")  # type: ignore[arg-type]
    assert EPConfig(recompute_modules=None).recompute_modules == ()  # type: ignore[arg-type]
