"""Hugging Face checkpoints into shards and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_ep import from_pretrained
from tests.checkpoint.hub import FineTune, cut_model, export_fails, fine_tune, there_and_back
from tests.distributed import run_distributed
from tests.reference import TINY, tiny_model, tokens

transformers.utils.logging.disable_progress_bar()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("merged", [False, True], ids=["one by one", "merged"])
@pytest.mark.parametrize("model_type", TINY)
def test_every_family_there_and_back(tmp_path: Path, model_type: str, merged: bool) -> None:
    """The right logits; each rank reads its experts once; what is exported is what was loaded, tensor by tensor."""
    model = tiny_model(model_type).eval()
    model.save_pretrained(tmp_path / "a", save_original_format=not merged, max_shard_size="50KB")
    with torch.no_grad():
        expected = model(input_ids=tokens(0, 0, 0)).logits
    on_disk = tensors_in(tmp_path / "a")
    for actual in run_distributed(there_and_back, 2, tmp_path / "a", tmp_path / "b", 2):
        torch.testing.assert_close(actual["logits"], expected, rtol=1e-4, atol=1e-5)
        assert not actual["training"] and not actual["meta"]
        experts_in_all = 2 * actual["experts"]
        assert actual["read"] == sum(t.nbytes for t in on_disk.values()) - experts_in_all // 2
        assert actual["held"] == sum(p.nbytes for p in model.parameters()) - experts_in_all // 2
    if not merged:
        exported = tensors_in(tmp_path / "b")
        assert exported.keys() == on_disk.keys()
        for name, tensor in on_disk.items():
            assert torch.equal(exported[name], tensor), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", attn_implementation="eager")
    loaded = again.state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name
    with torch.no_grad():  # not to the bit: CPU kernels round by how memory is aligned
        torch.testing.assert_close(again(input_ids=tokens(0, 0, 0)).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ep_size", [2, 4])
def test_only_own_experts_are_opened(tmp_path: Path, ep_size: int) -> None:
    """On four ranks; those that hold the same experts read the same, and one of them exports."""
    tiny_model("mixtral").save_pretrained(tmp_path / "a")
    names = [r["names"] for r in run_distributed(there_and_back, 4, tmp_path / "a", tmp_path / "b", ep_size)]
    share = 8 // ep_size
    for rank, read in enumerate(names):
        experts = {int(n.split(".experts.")[1].split(".")[0]) for n in read if ".experts." in n}
        assert experts == {share * (rank % ep_size) + i for i in range(share)}
        assert {n for n in read if ".experts." not in n} == {n for n in names[0] if ".experts." not in n}
    exported, original = tensors_in(tmp_path / "b"), tensors_in(tmp_path / "a")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_frozen_and_half_precision(tmp_path: Path, tied: bool) -> None:
    tiny_model("qwen3_moe", tie_word_embeddings=tied, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for dtype in (None, torch.float32):
        kwargs = {} if dtype is None else {"dtype": dtype}
        (rank, _) = run_distributed(_cut, 2, tmp_path, kwargs)
        assert rank["tied"] is tied and rank["frozen"] == ["model.embed_tokens.weight"]
        assert rank["dtypes"] == {dtype or torch.bfloat16} and rank["types"] == {torch.nn.Parameter}


def _cut(folder: Path, kwargs: dict) -> dict:
    return cut_model(folder, 2, **kwargs)


def test_fine_tune_and_export(tmp_path: Path) -> None:
    """The same module trains under the strategy and under Lightning's own, from the same weights."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "a")
    losses = run_distributed(fine_tune, 2, tmp_path / "a", tmp_path / "b", 2)
    plain = FineTune(tmp_path / "a")
    plain.configure_model()
    with torch.no_grad():
        for rank in range(2):
            first = plain.model(input_ids=tokens(0, 0, rank), labels=tokens(0, 0, rank)).loss.item()
            assert losses[rank][0] == pytest.approx(first, rel=1e-5)
    before, after = tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b")
    assert before.keys() == after.keys() and not any(torch.equal(before[n], after[n]) for n in before)
    FineTune(tmp_path / "b").configure_model()


def refused(path: Path, match: str) -> None:
    """Whole and cut alike."""
    with pytest.raises(ValueError, match=match):
        from_pretrained(path)
    for said in run_distributed(_fails, 2, path):
        assert said.startswith("ValueError")
        with pytest.raises(ValueError, match=match):
            raise ValueError(said)


def _fails(path: Path) -> str:
    from tests.checkpoint.runs import failure

    return failure(cut_model, path, 2)


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    good = tmp_path / "good"
    tiny_model("qwen3_moe").save_pretrained(good)
    refused(tmp_path / "nowhere", "nowhere is neither a directory nor a model that can be had from the Hub")

    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "it has no config.json, no model.safetensors or model.safetensors.index.json")

    def changed(name: str, change) -> Path:
        shutil.copytree(good, tmp_path / name)
        tensors = load_file(good / "model.safetensors")
        save_file(change(tensors), tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        return tmp_path / name

    lost = "model.layers.1.self_attn.q_proj.weight"
    refused(changed("lost", lambda t: {k: v for k, v in t.items() if k != lost}), f"{lost}")
    norm = "model.norm.weight"
    refused(changed("shape", lambda t: {**t, norm: torch.ones(3)}), "model.norm.weight")
    for expert in (2, 7):  # only one of the ranks reads it
        one = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        refused(
            changed(f"expert {expert}", lambda t, one=one: {k: v for k, v in t.items() if k != one}), "does not fit"
        )
    two = "model.layers.0.mlp.experts.2."
    lacking = changed("experts", lambda t: {k: v for k, v in t.items() if not k.startswith(two)})
    refused(lacking, "model.layers.0.mlp.experts")

    quantized = changed("quantized", lambda t: t)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (quantized / "config.json").write_text(json.dumps(config))
    for said in run_distributed(_fails, 2, quantized):
        assert "quantized is quantized" in said

    tiny = transformers.AutoConfig.for_model("llama", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                             num_attention_heads=1, vocab_size=16)  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(tiny).save_pretrained(tmp_path / "dense")
    for said in run_distributed(_fails, 2, tmp_path / "dense"):
        assert said.startswith("ExpertsNotFoundError: no experts found in LlamaForCausalLM")


def test_failed_exports_leave_nothing(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "a")
    for said in run_distributed(export_fails, 2, tmp_path / "a", tmp_path / "a", None):
        assert said.startswith("ValueError") and "is not empty; export to a new directory" in said
    for said in run_distributed(export_fails, 2, tmp_path / "a", tmp_path / "b", 1024):
        assert "File too large" in said
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
