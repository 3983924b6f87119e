"""The arithmetic of the A/B report, against published figures and by hand."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers

from lightning_ep.bench.flops import flops_per_token, tflops_per_gpu
from lightning_ep.bench.report import COLUMNS, ABReport, CaseResult, compare, sentence

QWEN3_30B_A3B = dict(
    hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144, vocab_size=151936,
)  # fmt: skip


def around(mean: float, jitter: float = 0.1) -> list[list[float]]:
    """Three repeats of six steps with this mean."""
    return [[mean + shift + s for s in (-jitter, jitter) * 3] for shift in (-jitter, 0.0, jitter)]


ALLTOALL = [
    CaseResult("no overlap", around(41.25)),
    CaseResult("overlap", around(31.31)),
    CaseResult("overlap + delayed wgrad", around(31.20)),
]


def test_published_relative_speeds():
    """1.000x / 1.317x / 1.322x, and the delayed wgrad's own share is no finding."""
    report = ABReport(ALLTOALL)
    assert [row[COLUMNS.index("relative")] for row in report.rows()] == ["1.000x", "1.317x", "1.322x"]
    first, second, third = report.comparisons()
    assert (first.verdict, second.verdict) == ("gain", "gain")
    assert (third.case, third.against, third.verdict) == ("overlap + delayed wgrad", "overlap", "inside the spread")
    assert "no difference shown" in sentence(third) and "a gain" not in sentence(third)


def test_published_reduction_and_throughput():
    """15.059% less time and 17.729% more throughput, in the digits in which they were published."""
    off, on = CaseResult("off", [[24.7138]]), CaseResult("on", [[20.9920]])
    comparison = compare(on, off)
    assert "+15.059% of the step time saved, +17.729% throughput" in sentence(comparison)
    assert comparison.relative_speed == pytest.approx(1.17730, abs=1e-5)


def test_published_tflops_come_out_of_the_formula():
    """244.039 and 287.305 TFLOP/s per GPU on 16 GPUs; their formula leaves the router out."""
    per_token = flops_per_token(SimpleNamespace(**QWEN3_30B_A3B), 4096)
    flops = (per_token.training - 3 * per_token.router) * 1024 * 4096
    assert tflops_per_gpu(flops, 24.7138, 16) == pytest.approx(244.039, rel=1e-4)
    assert tflops_per_gpu(flops, 20.9920, 16) == pytest.approx(287.305, rel=1e-4)
    assert per_token.router / per_token.forward == pytest.approx(0.003, abs=5e-4), "what docs/evidence.md says"


def test_flops_equal_two_per_active_weight_plus_attention():
    """Against the parameters of a real model: every matrix a token meets, counted once."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, intermediate_size=20, mlp_only_layers=[0],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = 0.0
    for name, weight in model.named_parameters():
        share = 3 / 8 if ".experts." in name else 1
        if weight.dim() >= 2 and "embed_tokens" not in name:
            expected += 2 * share * weight.numel()
    flops = flops_per_token(config, 64)
    assert flops.forward - flops.attention_core == pytest.approx(expected)
    # q k and p v: 2 FLOPs a multiply-add, 4 heads of 8, 32 keys on average, 2 layers.
    assert flops.attention_core == 2 * 2 * 4 * 8 * 32 * 2
    assert flops.training == 3 * flops.forward


@pytest.mark.parametrize(
    "name", ["Mixtral", "Qwen2Moe", "Olmoe", "DeepseekV3", "GptOss", "GraniteMoe", "Glm4Moe", "Ernie4_5_Moe", "Phimoe"]
)
def test_active_weights_of_other_families(name):
    """Projections, experts, shared experts, dense layers, router and head against the published weight shapes."""
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=4)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:4]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    experts = next(
        getattr(config, n)
        for n in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        if getattr(config, n, None)
    )
    top_k = config.moe_k if hasattr(config, "moe_k") else config.num_experts_per_tok
    weights = {id(w): (n, w) for n, w in model.named_parameters()}.values()
    active = sum(
        w.numel() * (top_k / experts if ".experts." in n else 1)
        for n, w in weights
        if w.dim() >= 2 and "embed_tokens" not in n and not n.endswith("bias")
    )
    if config.tie_word_embeddings:
        active += config.hidden_size * config.vocab_size
    flops = flops_per_token(config, 4096)
    assert flops.forward - flops.attention_core == pytest.approx(2 * active, rel=2e-3)


def test_sliding_window_limits_the_keys():
    window = SimpleNamespace(**QWEN3_30B_A3B, sliding_window=128, layer_types=["sliding_attention"] * 48)
    full = flops_per_token(SimpleNamespace(**QWEN3_30B_A3B), 4096)
    keys = sum(min(position, 128) for position in range(4096)) / 4096
    assert flops_per_token(window, 4096).attention_core / full.attention_core == pytest.approx(keys / 2048, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_experts": None}, "number of experts"), ({"layer_types": ["linear_attention"] * 48}, "layer_types")],
)
def test_what_the_formula_does_not_cover_is_said(change, message):
    with pytest.raises(ValueError, match=message):
        flops_per_token(SimpleNamespace(**QWEN3_30B_A3B | change), 4096)


def test_mean_and_spread():
    case = CaseResult("x", [[1.0, 3.0], [2.0, 4.0], [3.0, 3.0]])
    assert case.mean == pytest.approx(16 / 6) and case.range == (2.0, 3.0) and case.spread == 0.5
    single = CaseResult("x", [[1.0, 3.0, 2.0]])
    assert single.range == (1.0, 3.0), "with one repeat the steps themselves"


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([[1.0], [1.1]], [[1.2], [1.3]], "gain"),
        ([[1.0], [1.2]], [[1.2], [1.3]], "inside the spread"),
        ([[1.0], [1.25]], [[1.2], [1.3]], "inside the spread"),
        ([[1.4], [1.5]], [[1.2], [1.3]], "loss"),
        ([[1.0]], [[1.0]], "inside the spread"),
    ],
)
def test_a_difference_inside_the_spread_is_no_gain(ours, theirs, verdict):
    assert compare(CaseResult("a", ours), CaseResult("b", theirs)).verdict == verdict


def test_slower_is_said_and_not_rounded_away():
    text = sentence(compare(CaseResult("a", [[1.0001]]), CaseResult("b", [[1.0]])))
    assert "slower" in text and "-0.010%" in text and "0.999x" in text


def test_files(tmp_path):
    failed = CaseResult("wgrad | alone", failure="delay_wgrad_compute needs overlap")
    report = ABReport([*ALLTOALL, failed], {"hardware": "16 x H100"})
    report.write(tmp_path, "Qwen3", {"one step": "step.png"})
    text = (tmp_path / "report.md").read_text()
    assert "# Qwen3" in text and "- hardware: 16 x H100" in text and "![one step](step.png)" in text
    assert "| no overlap | 41.2500 s | ± 0.1000 s | 1.000x |" in text
    assert "- wgrad | alone: no result. delay_wgrad_compute needs overlap" in text
    header, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 5 and {row.replace("\\|", "").count("|") for row in rows} == {header.count("|")}
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["cases"][1]["step_seconds"] == around(31.31)
    assert data["comparisons"][0]["relative_speed"] == pytest.approx(41.25 / 31.31)
    assert not list(tmp_path.glob(".*"))


def test_a_failed_baseline_compares_nothing():
    report = ABReport([CaseResult("base", failure="out of memory"), CaseResult("other", [[1.0]])])
    assert report.comparisons() == []
    assert "no result. out of memory" in report.to_markdown()
