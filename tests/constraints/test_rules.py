"""Each rule violated alone, satisfied at its boundary, silent over unknown facts; and all of them in one error."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_ep.config import EPConfig
from lightning_ep.constraints import RULES, ConfigurationError, check, enforce
from lightning_ep.facts import FACT_NAMES, Facts
from lightning_ep.troubleshooting import NOTES, page
from tests.constraints.cases import CASES, EVERYTHING, GOOD, OBSERVED


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
    [
        ("bf16-mixed", True),
        ("bf16-true", True),
        ("16-mixed", True),
        ("16-true", True),
        ("transformer-engine", True),
        ("32-true", False),
        ("64-true", False),
        ("32", False),
    ],
)
def test_precisions(precision: str, allowed: bool) -> None:
    assert ("overlap-precision" not in ids(replace(GOOD, precision=precision))) == allowed


@pytest.mark.parametrize(
    ("schedule", "accumulation", "batch", "warned"),
    [
        ("auto", 1, 1, True),
        ("auto", 2, 1, False),
        ("auto", 1, 2, False),
        ("auto", 1, None, False),
        ("1f1b", 1, 8, True),
        ("1f1b", 2, 1, False),
        ("two_batch", 8, 1, True),
        ("two_batch", 1, 2, False),
    ],
)
def test_nothing_to_overlap(schedule: str, accumulation: int, batch: int | None, warned: bool) -> None:
    facts = replace(GOOD, overlap_schedule=schedule, accumulate_grad_batches=accumulation, batch_size=batch)
    assert ("overlap-nothing-to-overlap" in ids(facts)) == warned


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
    assert "symptom" not in str(caught.value) and "otherwise: an error while the experts are cut" in str(caught.value)
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
